// A server that plays one scenario of ../../../conformance/scenarios: it answers the requests that are written there,
// and holds against the client whatever else it hears.

import { isDeepStrictEqual } from "node:util";
import { createServer, type IncomingMessage, type Server } from "node:http";
import type { AddressInfo, Socket } from "node:net";
import { acceptOf } from "../dist/websocket.js";

type Json = any;

/** Where the server cuts: the connection of one exchange, after so many bytes of its answer. */
export interface Cut {
  exchange: number;
  after: number;
  /** Set when the answer was longer, so that the cut took place. */
  took?: boolean;
}

export class Scripted {
  readonly faults: string[] = [];
  readonly #scenario: Json;
  readonly #box: Json;
  readonly #cut: Cut | undefined;
  readonly #left: number[];
  readonly #served = new Set<number>();
  readonly #sockets = new Set<Socket>();
  readonly #server: Server;
  #first = true;
  #change: (() => void)[] = [];

  constructor(scenario: Json, box: Json, cut?: Cut) {
    this.#scenario = scenario;
    this.#box = box;
    this.#cut = cut;
    this.#left = scenario.exchanges.map((e: Json) => (e.always ? Infinity : (e.times ?? 1)));
    this.#server = createServer({ keepAlive: false });
    this.#server.on("connection", (socket: Socket) => {
      this.#sockets.add(socket);
      socket.on("error", () => undefined);
      socket.on("end", () => socket.end()); // upgraded sockets stay half open otherwise
      socket.on("close", () => this.#sockets.delete(socket));
    });
    const handle = (request: IncomingMessage, upgrade: boolean, head: Buffer): void => {
      this.#handle(request, upgrade, head).catch((error: unknown) => {
        if (this.#cut === undefined) this.faults.push(String(error));
        request.socket.destroy();
      });
    };
    this.#server.on("request", (request) => handle(request, false, Buffer.alloc(0)));
    this.#server.on("checkContinue", (request) => handle(request, false, Buffer.alloc(0)));
    this.#server.on("upgrade", (request, _, head) => handle(request, true, head));
  }

  async listen(): Promise<string> {
    await new Promise<void>((resolve) => this.#server.listen(0, "127.0.0.1", resolve));
    return `http://127.0.0.1:${(this.#server.address() as AddressInfo).port}`;
  }

  /** Ends the server. Says how many connections the client still held. */
  async close(): Promise<number> {
    for (let i = 0; i < 100 && this.#sockets.size > 0; i++) await new Promise((resolve) => setTimeout(resolve, 10));
    const held = this.#sockets.size;
    for (const socket of this.#sockets) socket.destroy();
    await new Promise((resolve) => this.#server.close(resolve));
    return held;
  }

  /** What was never asked for. */
  unasked(): string[] {
    return this.#scenario.exchanges.filter((e: Json, i: number) => !e.always && this.#left[i]! > 0).map((e: Json) => `${e.method} ${e.path}`);
  }

  async #handle(request: IncomingMessage, upgrade: boolean, head: Buffer): Promise<void> {
    const { socket } = request;
    const url = new URL(request.url!, "http://x");
    const box = "/v0/sandboxes/amber-acorn-0a1b";
    if (this.#first && request.method === "GET" && request.url === box) {
      this.#first = false;
      socket.end(answer({ status: 200, answer: this.#box }));
      return;
    }
    const path = request.url!.split("?")[0]!;
    const exchanges: Json[] = this.#scenario.exchanges;
    const index = exchanges.findIndex((e, i) => this.#left[i]! > 0 && e.method === request.method && e.path.replace("{box}", box) === path && (e.upgrade ?? false) === upgrade);
    if (index === -1) {
      this.faults.push(`unexpected: ${request.method} ${request.url}${upgrade ? " (upgrade)" : ""}`);
      socket.destroy();
      return;
    }
    const exchange = exchanges[index]!;
    this.#left[index]!--;
    const query = Object.fromEntries(url.searchParams);
    if (!this.#scenario.loose_query && !isDeepStrictEqual(query, exchange.query ?? {})) {
      this.faults.push(`${request.method} ${path} has the query ${JSON.stringify(query)}`);
    }
    for (const [name, want] of Object.entries<string>(exchange.request_headers ?? {})) {
      const got = request.headers[name];
      if (got !== want) this.faults.push(`${path} has the header ${name}: ${String(got)}`);
    }
    if (request.headers.authorization !== "Bearer test-key") this.faults.push("the key is missing");
    if (!/^useshards-typescript\/\d+\.\d+\.\d+$/.test(request.headers["user-agent"] ?? "")) this.faults.push("the client's name is missing");

    const write = this.#writer(socket, index);
    if (!upgrade && !exchange.early) {
      if (request.headers.expect !== undefined) socket.write("HTTP/1.1 100 Continue\r\n\r\n");
      const chunks: Buffer[] = [];
      for await (const chunk of request) chunks.push(chunk as Buffer);
      const body = Buffer.concat(chunks).toString("utf8");
      if ("json" in exchange && !isDeepStrictEqual(JSON.parse(body), exchange.json)) this.faults.push(`${request.method} ${path} has the body ${body}`);
      if ("body" in exchange && body !== exchange.body) this.faults.push(`${path} has the body ${JSON.stringify(body)}`);
      if (exchange.no_body && body !== "") this.faults.push(`${path} has a body`);
    }
    if (exchange.delay_ms) await sleep(exchange.delay_ms);
    if (!upgrade || exchange.status !== undefined) {
      const bytes = "raw_bytes" in exchange ? Buffer.from(exchange.raw_bytes) : answer(exchange);
      if (exchange.drip_ms) for (let i = 0; i < bytes.length && !socket.destroyed; i++, await sleep(exchange.drip_ms)) write(bytes.subarray(i, i + 1));
      else write(bytes);
      socket.end();
      if (exchange.early) setTimeout(() => socket.destroy(), 500).unref();
      this.#done(index);
      return;
    }
    const headers = Object.entries<string>(exchange.headers ?? {}).map(([k, v]) => `${k}: ${v}\r\n`);
    const accept = exchange.accept ?? acceptOf(request.headers["sec-websocket-key"]!);
    write(Buffer.from(`HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: ${accept}\r\n${headers.join("")}\r\n`));
    await this.#play(socket, head, exchange.stream, index, write);
    this.#done(index);
  }

  /** Plays a stream's steps in order. */
  async #play(socket: Socket, head: Buffer, steps: Json[], index: number, write: (b: Buffer) => void): Promise<void> {
    const client = new Client(socket, head);
    for (const step of steps) {
      if (socket.destroyed) return;
      if ("binary" in step) {
        const payload = "json" in step ? Buffer.from(JSON.stringify(step.json)) : "hex" in step ? Buffer.from(step.hex, "hex") : Buffer.from(step.text);
        write(frame(2, Buffer.concat([Buffer.of(step.binary), payload])));
      } else if ("binary_empty" in step) write(frame(2, Buffer.alloc(0)));
      else if ("text_message" in step) write(frame(1, Buffer.from(step.text_message)));
      else if ("ping" in step) write(frame(9, Buffer.from(step.ping)));
      else if ("raw" in step) write(Buffer.from(step.raw.replaceAll(" ", ""), "hex"));
      else if ("pause_ms" in step) await sleep(step.pause_ms);
      else if ("cut" in step) socket.destroy();
      else if ("close" in step) {
        write(frame(8, Buffer.concat([Buffer.of(step.close >> 8, step.close & 255), Buffer.from(step.reason ?? "")])));
        await Promise.race([client.until(() => client.closed).catch(() => undefined), sleep(3000)]);
        socket.end();
      } else if ("expect_pong" in step) await client.until(() => client.pongs.includes(step.expect_pong));
      else if ("expect_end_of_input" in step) await client.until(() => client.inputEnded);
      else if ("expect_gone" in step) {
        await client.until(() => client.gone || client.closed);
        socket.destroy();
      } else if ("expect_input" in step) {
        const want = value(step.expect_input, {}) as string;
        await client.until(() => client.input.length >= want.length);
        if (client.input !== want) this.faults.push(`the input was ${client.input.slice(0, 100)}`);
        if (step.pieces_of_at_most && client.longest > step.pieces_of_at_most) this.faults.push(`a piece of input has ${client.longest} bytes`);
      } else if ("wait_for" in step) {
        const later = (): number => [...this.#served].filter((i) => i > index).length;
        while (later() < step.wait_for) await new Promise<void>((resolve) => this.#change.push(resolve));
      } else this.faults.push(`unknown step ${JSON.stringify(step)}`);
    }
  }

  #done(index: number): void {
    this.#served.add(index);
    for (const wake of this.#change.splice(0)) wake();
  }

  #writer(socket: Socket, index: number): (bytes: Buffer) => void {
    const cut = this.#cut?.exchange === index ? this.#cut : undefined;
    let sent = 0;
    return (bytes) => {
      if (socket.destroyed || socket.writableEnded) return;
      if (cut === undefined || sent + bytes.length <= cut.after) {
        socket.write(bytes);
        sent += bytes.length;
        return;
      }
      cut.took = true;
      socket.end(bytes.subarray(0, cut.after - sent), () => socket.destroy());
    };
  }
}

/** What a client sends on a stream. */
class Client {
  input = "";
  longest = 0;
  inputEnded = false;
  closed = false;
  gone = false;
  pongs: string[] = [];
  #buffer: Buffer;
  #wake: (() => void)[] = [];

  constructor(socket: Socket, head: Buffer) {
    this.#buffer = head;
    socket.on("data", (chunk: Buffer) => {
      this.#buffer = Buffer.concat([this.#buffer, chunk]);
      while (this.#frame());
      for (const wake of this.#wake.splice(0)) wake();
    });
    socket.on("close", () => {
      this.gone = true;
      for (const wake of this.#wake.splice(0)) wake();
    });
    socket.resume();
  }

  async until(condition: () => boolean): Promise<void> {
    while (!condition()) {
      if (this.gone) throw new Error("the client has gone");
      await new Promise<void>((resolve) => this.#wake.push(resolve));
    }
  }

  #frame(): boolean {
    const b = this.#buffer;
    if (b.length < 6) return false;
    if ((b[1]! & 0x80) === 0) throw new Error("a frame of the client is not masked");
    let size = b[1]! & 0x7f;
    let at = 2;
    if (size === 126) [size, at] = [b.readUInt16BE(2), 4];
    else if (size === 127) [size, at] = [Number(b.readBigUInt64BE(2)), 10];
    if (b.length < at + 4 + size) return false;
    const mask = b.subarray(at, at + 4);
    const payload = Buffer.from(b.subarray(at + 4, at + 4 + size)).map((x, i) => x ^ mask[i % 4]!);
    this.#buffer = b.subarray(at + 4 + size);
    const code = b[0]! & 0xf;
    if (code === 8) this.closed = true;
    else if (code === 10) this.pongs.push(Buffer.from(payload).toString());
    else if (code === 2 && payload[0] === 0) {
      this.input += Buffer.from(payload.subarray(1)).toString();
      this.longest = Math.max(this.longest, payload.length - 1);
    } else if (code === 2 && payload[0] === 4) this.inputEnded = true;
    return true;
  }
}

/** One frame of a server. */
export function frame(opcode: number, payload: Buffer): Buffer {
  const size = payload.length;
  const head = size < 126 ? Buffer.of(0x80 | opcode, size) : size < 65536 ? Buffer.of(0x80 | opcode, 126, size >> 8, size & 255) : Buffer.alloc(10);
  if (size >= 65536) {
    head[0] = 0x80 | opcode;
    head[1] = 127;
    head.writeBigUInt64BE(BigInt(size), 2);
  }
  return Buffer.concat([head, payload]);
}

/** An HTTP answer, after which the connection ends, as behind shard serve. */
function answer(exchange: Json): Buffer {
  const status = exchange.status ?? 200;
  const body = "raw_answer" in exchange ? Buffer.from(exchange.raw_answer) : "answer" in exchange ? Buffer.from(JSON.stringify(exchange.answer)) : Buffer.alloc(0);
  const headers = ["Connection: close", ...Object.entries<string>(exchange.headers ?? {}).map(([k, v]) => `${k}: ${v}`)];
  const chunked = exchange.chunked ?? false;
  if (exchange.method !== "HEAD" && status !== 204) headers.push(chunked ? "Transfer-Encoding: chunked" : `Content-Length: ${body.length}`);
  const head = Buffer.from(`HTTP/1.1 ${status} x\r\n${headers.join("\r\n")}\r\n\r\n`);
  if (!chunked) return Buffer.concat([head, body]);
  const parts = [head, Buffer.from(`${body.length.toString(16)}\r\n`), body, Buffer.from("\r\n")];
  if (!exchange.unfinished) parts.push(Buffer.from("0\r\n\r\n"));
  return Buffer.concat(parts);
}

/** A value as it is written in a scenario. */
export function value(v: Json, context: Record<string, (arg: Json) => unknown>): unknown {
  if (typeof v !== "object" || v === null) return v;
  if (Array.isArray(v)) return v.map((item) => value(item, context));
  const [key] = Object.keys(v);
  if (key === "$repeat") return v.$repeat[0].repeat(v.$repeat[1]);
  if (key === "$hex") return Buffer.from(v.$hex, "hex");
  if (key?.startsWith("$")) return context[key]!(v[key]);
  return Object.fromEntries(Object.entries(v).map(([k, item]) => [k, value(item, context)]));
}

function sleep(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms));
}
