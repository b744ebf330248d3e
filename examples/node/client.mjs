// Submit a job and print its events as JSON, one a line: docs/protocol.md in plain Node.js.
//   node client.mjs PROMPT                  the first line has the job's id
//   node client.mjs --resume JOB OFFSET     go on after the first OFFSET tokens
// INFERQ_REDIS_URL and INFERQ_QUEUE say where.
import { createHash, randomBytes, randomInt } from "node:crypto";
import { readFileSync } from "node:fs";
import { decode, encode } from "./msgpack.mjs";
import { Redis } from "./redis.mjs";

const HOUR_MS = 3600000, MAX_TOKENS = 64, TEXT_MARGIN = 8, QUEUE_LIMIT = 100000, OUTBOX_LIMIT = 100000;
const prefix = `inferq:{${process.env.INFERQ_QUEUE ?? "default"}.0}:`;
const names = ["load", "leases", "delayed", "dead", "workers", "jobs:high", "jobs:normal", "jobs:low"];
const lua = (name) => readFileSync(new URL(`../../protocol/lua/${name}.lua`, import.meta.url), "utf8");
const hash = (algorithm, data) => createHash(algorithm).update(data).digest("hex");

async function callScript(redis, name, ...args) {
  const script = `${lua("prelude")}\n${lua(name)}`;
  const rest = [names.length, ...names.map((key) => prefix + key), ...args];
  return redis.call("EVALSHA", hash("sha1", script), ...rest).catch((error) => {
    if (!error.message.startsWith("NOSCRIPT")) throw error;
    return redis.call("EVAL", script, ...rest);
  });
}

async function submit(redis, prompt) {
  const now = Date.now(), size = Buffer.byteLength(prompt) + TEXT_MARGIN;
  const id = `${now.toString(16).padStart(12, "0")}${randomBytes(10).toString("hex")}-0`;
  const asked = { p: prompt, s: { max_tokens: MAX_TOKENS } };
  const job = { ...asked, v: 1, id, s: { ...asked.s, seed: randomInt(2 ** 47) }, t: now };
  const [status, detail] = await callScript(redis, "enqueue",
    id, encode(job), "normal", size, MAX_TOKENS, size + MAX_TOKENS, /* deadline, delay */ 0, 0,
    hash("sha256", encode(asked)), QUEUE_LIMIT, HOUR_MS, /* key, note, webhook */ "", "", "", OUTBOX_LIMIT);
  if (`${status}` !== "created") throw new Error(`refused: ${status} ${detail}`);
  return id;
}

async function* follow(redis, job, offset) {
  for (let event = {}, isDone = false; !event.end; ) {
    const read = await redis.call("XREAD", "BLOCK", 1000, "STREAMS", `${prefix}out:${job}`, `${offset}-0`);
    // it may have ended after a read that brought nothing: only the one after the look tells
    if (read === null && isDone) throw new Error(`job ${job} ended before that offset, or its events have expired`);
    if (read === null) isDone = await lookAfter(redis, job);
    for (const [id, [, payload]] of read?.[0][1] ?? []) {
      event = decode(payload);
      const tokens = event.t ?? [], total = Number(`${id}`.split("-")[0]), had = offset - (total - tokens.length);
      if (had < 0) throw new Error(`tokens from ${offset} on are missing`);
      const cut = had === 0 ? 0 : (event.e ?? [Infinity])[had - 1];
      offset = total;
      yield { output: event.i, tokens: tokens.slice(had), text: [...(event.x ?? "")].slice(cut).join(""), offset,
        finish: event.f, end: event.end };
    }
  }
}

async function lookAfter(redis, job) {
  const [state, deadline] = await redis.call("HMGET", `${prefix}job:${job}`, "state", "deadline");
  if (state === null) throw new Error(`job ${job} is unknown, or was forgotten`);
  if (`${state}` !== "done" && Number(deadline) > 0) await callScript(redis, "expire", job, HOUR_MS);
  return `${state}` === "done";
}

const [prompt, ...resumed] = process.argv.slice(2);
const isResume = prompt === "--resume" && resumed.length === 2 && /^\d{1,15}$/.test(resumed[1]);
if (!isResume && (!prompt || prompt === "--resume" || resumed.length)) {
  console.error("usage: node client.mjs PROMPT | --resume JOB OFFSET (a number of tokens)");
  process.exit(2);
}
try {
  const redis = await Redis.connect(process.env.INFERQ_REDIS_URL ?? "redis://127.0.0.1:6379/0");
  const [job, offset] = isResume ? resumed : [await submit(redis, prompt), 0];
  console.log(JSON.stringify({ job }));
  for await (const event of follow(redis, job, Number(offset))) console.log(JSON.stringify(event));
  redis.close();
} catch (error) {
  console.error(`client: ${error.message || error.code}`);
  process.exit(1);
}
