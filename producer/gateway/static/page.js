// The page: a conversation, the answer under way, and what survives a reload of the tab.

import { watchModels } from "./models.js";
import * as settings from "./settings.js";
import { ApiError, answer, call, newIdempotencyKey } from "./stream.js";
import * as view from "./view.js";

const KEPT = "inferq.conversation";
const $ = (id) => document.getElementById(id);

// turns: what is over, see `view.show`; run: the answer under way, see `answer`.
let state = { turns: [], run: null };
let isBusy = false;
let stopAsked = false;

function keep() {
  sessionStorage.setItem(KEPT, JSON.stringify(state));
}

function send() {
  const prompt = $("prompt").value;
  if (prompt.trim() === "" || isBusy) return;
  const wrong = settings.invalidField();
  if (wrong) {
    view.openPanel(true);
    wrong.reportValidity();
    return;
  }
  const isChat = settings.mode() === "chat";
  const before = state.turns.filter(({ role }) => role === "user" || role === "assistant");
  state.run = {
    ...settings.request(prompt, before),
    idempotencyKey: newIdempotencyKey(),
    id: null,
  };
  state.turns.push({ role: isChat ? "user" : "given", content: prompt });
  view.show(state.turns.at(-1));
  $("prompt").value = "";
  view.fit();
  keep();
  follow();
}

// Follows the run in `state` from its beginning, into a turn that is kept once it is over.
async function follow() {
  const { run } = state;
  const isChat = run.path.includes("chat");
  const turn = { role: isChat ? "assistant" : "continuation", content: "" };
  const shown = view.show(turn);
  shown.box.classList.add("waiting");
  isBusy = true;
  view.setBusy(true);
  view.problem("");
  view.scrollDown();
  let next = $("prompt");
  try {
    const meter = await read(run, turn, shown.text);
    view.status(view.summary(meter));
    settle(turn);
  } catch (error) {
    explain(error);
    if (error.status === 401) next = $("key");
    // a lost answer goes on, and can be read after a reload
    if (error instanceof ApiError) settle(turn);
  } finally {
    if (turn.content === "" && isChat) shown.box.remove();
    shown.box.classList.remove("waiting");
    isBusy = stopAsked = false;
    view.setBusy(false);
    next.focus();
  }
}

async function read(run, turn, text) {
  const meter = { startedAt: performance.now(), firstAt: null, isReplay: run.id !== null };
  view.status(meter.isReplay ? "Going on …" : "Waiting …");
  const onId = () => {
    keep();
    if (stopAsked) stop();
  };
  const onCut = () => view.status("Connection lost; trying again …");
  for await (const chunk of answer(run, { key: settings.apiKey(), onId, onCut })) {
    const [choice] = chunk.choices;
    const added = choice?.delta?.content ?? choice?.text ?? "";
    if (added !== "") {
      meter.firstAt ??= performance.now();
      if (!stopAsked) view.status("Answering …");
      const sticks = view.isAtEnd();
      turn.content += added;
      text.appendData(added);
      if (sticks) view.scrollDown();
    }
    meter.finish = choice?.finish_reason ?? meter.finish;
    meter.usage = chunk.usage ?? meter.usage;
  }
  return meter;
}

function settle(turn) {
  if (turn.content !== "") state.turns.push(turn);
  state.run = null;
  keep();
}

function explain(error) {
  if (error instanceof ApiError && error.code === "cancelled") {
    view.status("Stopped");
    return;
  }
  view.status("");
  const isLost = !(error instanceof ApiError);
  view.problem(isLost ? `${error.message} Reload the page to go on.` : error.message);
  if (error.status === 401) view.openPanel(true);
}

async function stop() {
  stopAsked = true;
  $("stop").disabled = true;
  view.status("Stopping …");
  const id = state.run.id;
  if (!id) return; // as soon as it is known
  try {
    await call(`v1/streams/${encodeURIComponent(id)}`, { method: "DELETE", key: settings.apiKey() });
  } catch (error) {
    stopAsked = $("stop").disabled = false;
    view.problem(error.message);
  }
}

function clear() {
  state = { turns: [], run: null };
  keep();
  view.showAll(state.turns);
  view.problem("");
  view.status("");
  $("prompt").focus();
}

function wire() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("prompt").addEventListener("input", view.fit);
  $("prompt").addEventListener("keydown", (event) => {
    const asks = settings.mode() === "chat" ? !event.shiftKey : event.ctrlKey || event.metaKey;
    if (event.key !== "Enter" || event.isComposing || !asks) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && isBusy && !stopAsked) stop();
  });
  document.addEventListener("change", () => {
    settings.keep();
    view.fit();
  });
  $("stop").addEventListener("click", stop);
  $("clear").addEventListener("click", clear);
  $("settings").addEventListener("click", () => view.openPanel());
  $("examples").addEventListener("click", (event) => {
    if (event.target.tagName !== "BUTTON") return;
    $("prompt").value = event.target.textContent;
    send();
  });
}

wire();
const chosen = settings.restore();
state = JSON.parse(sessionStorage.getItem(KEPT) ?? "null") ?? state;
view.showAll(state.turns);
view.fit();
watchModels(chosen);
if (state.run) follow();
