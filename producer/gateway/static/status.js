// The status page: asks for the queues every other second, and for the blocks of what is in view.

import { showQueue } from "./queue.js";
import { call } from "./stream.js";

const EVERY_MS = 2_000;
const KEPT = "inferq.key";
const $ = (id) => document.getElementById(id);

// By name.
const shown = new Map();
let key = sessionStorage.getItem(KEPT) ?? tryItKey();

// The key that was given on the page to try the gateway, in this tab.
function tryItKey() {
  return JSON.parse(sessionStorage.getItem("inferq.settings") ?? "{}").key ?? "";
}

async function look() {
  try {
    if (document.visibilityState === "visible") await show(await ask("status/queues"));
  } catch (error) {
    complain(error);
  }
  setTimeout(look, EVERY_MS);
}

async function ask(path) {
  return (await call(path, { key })).json();
}

async function show({ queues, interval_s }) {
  const names = new Set(queues.map(({ queue }) => queue));
  for (const [name, section] of shown) {
    if (names.has(name)) continue;
    section.remove();
    shown.delete(name);
  }
  for (const queue of queues) {
    if (!shown.has(queue.queue)) shown.set(queue.queue, showQueue($("queues"), ask));
    shown.get(queue.queue).show(queue, interval_s);
  }
  const isGood = queues.every(({ is_reached }) => is_reached);
  $("nothing").hidden = queues.length > 0;
  $("ask").hidden = $("problem").hidden = true;
  $("dot").className = isGood ? "dot good" : "dot bad";
  say(`as of ${new Date().toLocaleTimeString()}`);
}

function complain(error) {
  const needsKey = error.status === 401;
  $("dot").className = "dot bad";
  $("problem").hidden = needsKey && !key;
  $("problem").textContent = error.status ? error.message : "The gateway cannot be reached.";
  if (needsKey && $("ask").hidden) {
    $("ask").hidden = false;
    $("key").focus();
  }
  if (needsKey) say("needs an API key");
}

function say(text) {
  $("said").textContent = text;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem(KEPT, key);
  ask("status/queues").then(show).catch(complain);
});

look();
