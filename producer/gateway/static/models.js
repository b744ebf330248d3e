// The choice of model: what the gateway serves now.

import { apiKey } from "./settings.js";
import { call } from "./stream.js";

const EVERY_MS = 10_000;
const $ = (id) => document.getElementById(id);

// The user's choice, also while it is not served.
let wanted = "";

/** Keep the list up to date from now on; `chosen` is the model to choose when it is there. */
export function watchModels(chosen) {
  wanted = chosen;
  $("model").addEventListener("change", () => (wanted = $("model").value));
  $("key").addEventListener("change", findModels);
  setInterval(findModels, EVERY_MS);
  findModels();
}

async function findModels() {
  try {
    const { data } = await (await call("v1/models", { key: apiKey() })).json();
    offer(data.map(({ id }) => id));
    $("dot").className = data.length > 0 ? "dot good" : "dot";
  } catch (error) {
    $("dot").className = "dot bad";
    const text = error.status === 401 ? "needs an API key" : "cannot be reached";
    $("model").replaceChildren(new Option(text, ""));
  }
}

function offer(names) {
  const select = $("model");
  const before = select.value;
  if (names.join("\n") === Array.from(select.options, ({ value }) => value).join("\n")) return;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.length === 0) select.append(new Option("no model is served", ""));
  const chosen = [wanted, before].find((name) => names.includes(name));
  if (chosen) select.value = chosen;
}
