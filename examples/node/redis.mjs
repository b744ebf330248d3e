// What a Redis package would give: one connection that calls one command at a time (RESP2).
import net from "node:net";
import tls from "node:tls";

const SILENCE_MS = 15000;

export class Redis {
  #socket;
  #chunks;
  #buffer = Buffer.alloc(0);

  static async connect(url) {
    const { protocol, hostname: host, port, username, password, pathname } = new URL(url);
    const redis = new Redis();
    const where = { host, port: Number(port || 6379) };
    redis.#socket = protocol === "rediss:" ? tls.connect({ ...where, servername: host }) : net.connect(where);
    redis.#socket.setTimeout(SILENCE_MS, () => redis.#socket.destroy(new Error("the server is silent")));
    redis.#chunks = redis.#socket[Symbol.asyncIterator]();
    if (password) await redis.call("AUTH", ...[username, password].filter(Boolean).map(decodeURIComponent));
    if (pathname.length > 1) await redis.call("SELECT", pathname.slice(1));
    return redis;
  }

  async call(...parts) {
    this.#socket.write(`*${parts.length}\r\n`);
    for (const part of parts) {
      const bytes = Buffer.isBuffer(part) ? part : Buffer.from(String(part));
      this.#socket.write(Buffer.concat([Buffer.from(`$${bytes.length}\r\n`), bytes, Buffer.from("\r\n")]));
    }
    const reply = await this.#read();
    if (reply instanceof Error) throw reply;
    return reply;
  }

  close() {
    this.#socket.end();
  }

  async #read() {
    const line = `${await this.#take(await this.#lineLength())}`;
    await this.#take(2);
    const rest = line.slice(1);
    const number = Number(rest);
    switch (line[0]) {
      case "+":
        return rest;
      case "-":
        return new Error(rest);
      case ":":
        return number;
      case "$": {
        if (number < 0) return null;
        const bytes = await this.#take(number);
        await this.#take(2);
        return bytes;
      }
      case "*": {
        if (number < 0) return null;
        const items = [];
        for (let i = 0; i < number; i++) items.push(await this.#read());
        return items;
      }
    }
    throw new Error(`not RESP2: ${line}`);
  }

  async #lineLength() {
    while (!this.#buffer.includes("\r\n")) await this.#fill();
    return this.#buffer.indexOf("\r\n");
  }

  async #take(size) {
    while (this.#buffer.length < size) await this.#fill();
    const taken = this.#buffer.subarray(0, size);
    this.#buffer = this.#buffer.subarray(size);
    return taken;
  }

  async #fill() {
    const { value, done } = await this.#chunks.next();
    if (done) throw new Error("the server closed the connection");
    this.#buffer = Buffer.concat([this.#buffer, value]);
  }
}
