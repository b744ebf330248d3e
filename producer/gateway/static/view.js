// What is shown: the turns of the conversation, problems, and whether an answer is under way.

import { mode } from "./settings.js";

const $ = (id) => document.getElementById(id);

/**
 * Add a turn, {role, content}; return its box and the text in it, which may be added to.
 *
 * Roles: user and assistant; in completions given and, in the same item, continuation.
 */
export function show({ role, content }) {
  const item = role === "continuation" ? $("turns").lastElementChild : document.createElement("li");
  const isChat = role === "user" || role === "assistant";
  const box = isChat ? item : document.createElement("span");
  box.className = `turn ${role}`;
  const text = document.createTextNode(content);
  box.append(text);
  if (box !== item) item.append(box);
  if (role !== "continuation") $("turns").append(item);
  $("welcome").hidden = true;
  return { box, text };
}

/** Show these turns and no others. */
export function showAll(turns) {
  $("turns").replaceChildren();
  $("welcome").hidden = turns.length > 0;
  turns.forEach(show);
}

/** Whether the end of the conversation is in sight. */
export function isAtEnd() {
  const box = $("scroll");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 80;
}

/** Bring the end of the conversation into sight. */
export function scrollDown() {
  $("scroll").scrollTop = $("scroll").scrollHeight;
}

/** Say what went wrong; "" takes it away. */
export function problem(message) {
  $("problem").textContent = message;
  $("problem").hidden = message === "";
  if (message !== "") scrollDown();
}

/** Say how the answer stands. */
export function status(text) {
  $("status").textContent = text;
}

/** Offer to stop while an answer is under way, else to send. */
export function setBusy(isBusy) {
  $("send").hidden = isBusy;
  $("keys").hidden = isBusy;
  $("stop").hidden = !isBusy;
  $("stop").disabled = false;
  $("clear").disabled = isBusy;
}

/** Fit words and fields to the mode, and the prompt's box to its text. */
export function fit() {
  const isChat = mode() === "chat";
  $("system-field").hidden = !isChat;
  $("prompt").placeholder = isChat ? "Ask something" : "Begin a text; the model goes on";
  $("keys").textContent = isChat ? "Enter sends" : "Ctrl + Enter sends";
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight}px`;
}

/** Open or close the panel where it is not always there. */
export function openPanel(isOpen = !$("panel").classList.contains("open")) {
  $("panel").classList.toggle("open", isOpen);
  $("settings").setAttribute("aria-expanded", String(isOpen));
}

/** Return how an answer went, in a few words. */
export function summary({ startedAt, firstAt, isReplay, finish, usage }) {
  const parts = [];
  const tokens = usage?.completion_tokens ?? 0;
  if (tokens) parts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
  if (firstAt !== null && !isReplay) {
    parts.push(`first after ${Math.round(firstAt - startedAt)} ms`);
    const seconds = (performance.now() - firstAt) / 1000;
    if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
  }
  if (finish === "length") parts.push("ended at the limit of tokens");
  return parts.join(" · ") || "Done";
}
