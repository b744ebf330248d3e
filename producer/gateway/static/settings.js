// What the panel asks for: kept for the tab, and turned into a request.

const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "seed"];
const FIELDS = [...NUMBERS, "service_tier", "system", "stop_at", "key", "model"];
const KEPT = "inferq.settings";

const field = (name) => document.getElementById(name);

/** "chat" or "completion". */
export function mode() {
  return document.querySelector("input[name=mode]:checked").value;
}

/** The API key, or "". */
export function apiKey() {
  return field("key").value.trim();
}

/** Keep the panel's state in this tab. */
export function keep() {
  const values = Object.fromEntries(FIELDS.map((name) => [name, field(name).value]));
  sessionStorage.setItem(KEPT, JSON.stringify({ ...values, mode: mode() }));
}

/** Put back what was kept; return the model chosen then, if any. */
export function restore() {
  const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "null");
  if (kept === null) return "";
  for (const name of FIELDS) if (name !== "model") field(name).value = kept[name];
  document.querySelector(`input[name=mode][value=${kept.mode}]`).checked = true;
  return kept.model;
}

/** Return the first field that holds something impossible, or null. */
export function invalidField() {
  return NUMBERS.map(field).find((input) => !input.checkValidity()) ?? null;
}

/** Return {path, body} of the request for a prompt behind `turns` ({role, content}). */
export function request(prompt, turns) {
  const body = { stream: true, stream_options: { include_usage: true } };
  if (field("model").value !== "") body.model = field("model").value;
  for (const name of NUMBERS) if (field(name).value !== "") body[name] = Number(field(name).value);
  const stop = field("stop_at").value.split("\n").filter((line) => line !== "");
  if (stop.length > 0) body.stop = stop;
  if (field("service_tier").value !== "default") body.service_tier = field("service_tier").value;
  if (mode() === "completion") return { path: "v1/completions", body: { ...body, prompt } };
  const system = field("system").value.trim();
  const messages = [...turns, { role: "user", content: prompt }];
  if (system) messages.unshift({ role: "system", content: system });
  return { path: "v1/chat/completions", body: { ...body, messages } };
}
