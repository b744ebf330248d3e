// Talks to the gateway: one answer as a stream of chunks that survives cuts and reloads.

// How long to try again without a sign of life, and the first and longest pause, in ms.
const GIVE_UP_MS = 30_000;
const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 4_000;
// What a proxy or a gateway that restarts answers.
const PASSING = new Set([502, 503, 504]);

/** An error that the gateway answered, in its own words. */
export class ApiError extends Error {
  constructor(status, error) {
    super(error.message || `The gateway answered ${status}.`);
    this.status = status;
    this.code = error.code ?? null;
  }
}

/** Send a request with the API key, if there is one; throw ApiError unless it succeeds. */
export async function call(path, { key = "", headers = {}, ...options } = {}) {
  const auth = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(path, { ...options, headers: { ...headers, ...auth } });
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new ApiError(response.status, body.error ?? {});
  }
  return response;
}

/** A text that no other submission uses; also where the page is not served by HTTPS. */
export function newIdempotencyKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return `page-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

/**
 * Yield the chunks of one answer until it is complete.
 *
 * `run` is {path, body, idempotencyKey, id}: with an id the answer is read from its beginning,
 * without one it is asked for; `onId` is called once the id is known, `onCut` whenever the
 * connection is lost and will be tried again.
 */
export async function* answer(run, { key, onId, onCut }) {
  let lastEventId = null;
  let giveUpAt = Date.now() + GIVE_UP_MS;
  let pause = FIRST_PAUSE_MS;
  for (;;) {
    try {
      const response = await open(run, lastEventId, key);
      if (!run.id) {
        run.id = response.headers.get("X-Inferq-Job-Id");
        onId(run.id);
      }
      for await (const event of events(response.body)) {
        if (event.data === "[DONE]") return;
        const chunk = JSON.parse(event.data);
        if (chunk.error) throw new ApiError(response.status, chunk.error);
        lastEventId = event.id ?? lastEventId;
        giveUpAt = Date.now() + GIVE_UP_MS;
        pause = FIRST_PAUSE_MS;
        yield chunk;
      }
    } catch (error) {
      if (!(error instanceof ApiError ? run.id && PASSING.has(error.status) : isCut(error))) {
        throw error;
      }
    }
    if (Date.now() > giveUpAt) throw new Error("The gateway cannot be reached.");
    onCut();
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
  }
}

function open(run, lastEventId, key) {
  if (!run.id) {
    const headers = { "Content-Type": "application/json", "Idempotency-Key": run.idempotencyKey };
    return call(run.path, { method: "POST", body: JSON.stringify(run.body), headers, key });
  }
  const headers = lastEventId === null ? {} : { "Last-Event-ID": lastEventId };
  return call(`v1/streams/${encodeURIComponent(run.id)}`, { headers, key });
}

// fetch and its body's reader throw TypeError when the network fails.
function isCut(error) {
  return error instanceof TypeError;
}

/** Yield the {id, data} of each event of an SSE body; comments are keep-alive and are skipped. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const event = parse(block);
        if (event.data !== null) yield event;
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

function parse(block) {
  const event = { id: null, data: null };
  for (const line of block.split(/\r?\n/)) {
    const colon = line.indexOf(":");
    if (colon < 1) continue;
    const value = line.slice(colon + 1).replace(/^ /, "");
    const field = line.slice(0, colon);
    if (field === "id") event.id = value;
    if (field === "data") event.data = event.data === null ? value : `${event.data}\n${value}`;
  }
  return event;
}
