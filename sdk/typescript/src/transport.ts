/**
 * The one place that talks HTTP: a connection pool with the CA and the key, bounds, uploads with back-pressure, upgrades.
 * Knows routes only as text.
 */

import * as http from "node:http";
import * as https from "node:https";
import type { Socket } from "node:net";
import { createSecureContext } from "node:tls";
import { ProtocolError, ShardConnectionError, ShardError, refusal } from "./errors.js";
import type { Settings } from "./settings.js";
import { Stream } from "./stream.js";
import { packageVersion } from "./version.js";
import { acceptOf, newKey } from "./websocket.js";

/** Bounds in ms; tests shorten them. */
export const bounds: {
  /** How long a plain request may take. */
  request: number;
  /** The pulse of heartbeats: a server that is dead for five of them ends a wait. */
  beat: number;
} = { request: 60_000, beat: 4_000 };

/** The longest JSON answer that is read, in bytes. */
const maxAnswer = 128 << 20;

/** Below this a body is sent with its head; above, the server is asked first whether it wants it. In bytes. */
const smallBody = 64 << 10;

/** How long a server may take to say that it wants a body before it gets it all the same, in ms. */
const askPatience = 1_000;

export interface Body {
  readonly type: string;
  /** Undefined: chunked. */
  readonly length: number | undefined;
  readonly chunks: AsyncIterable<Uint8Array> | Iterable<Uint8Array>;
}

export interface RequestOptions {
  query?: Record<string, string | boolean | undefined>;
  json?: unknown;
  body?: Body;
  signal?: AbortSignal | undefined;
  /** The server may take any time: no bound but that it stays alive. */
  waits?: boolean;
}

/** A path of the API. Every segment is one, whatever it holds. */
export function route(...segments: string[]): string {
  return `/v0/${segments.map(segment).join("/")}`;
}

function segment(text: string): string {
  if (typeof text !== "string" || text === "") throw new TypeError("an id or name must be a string that is not empty");
  return encodeURIComponent(text).replace(/^\.{1,2}$/, (dots) => dots.replaceAll(".", "%2E"));
}

export class Transport {
  readonly #settings: Settings;
  readonly #agent: http.Agent;
  readonly #upgrades: http.Agent;
  readonly #streams = new Set<Socket>();
  readonly #requests = new Set<http.ClientRequest>();
  #closed = false;

  constructor(settings: Settings) {
    this.#settings = settings;
    // Idle connections are dropped before servers usually drop theirs, so that few requests meet one that is closing.
    const pool = { keepAlive: true, maxFreeSockets: 16, timeout: 4_000, scheduling: "lifo" as const };
    // One context for all connections: each request is a new one, and node would parse the CAs for each again, which takes
    // longer than the handshake.
    const tls = settings.secure && {
      secureContext: createSecureContext({ ca: settings.ca }),
      rejectUnauthorized: true,
      ALPNProtocols: ["http/1.1"],
    };
    this.#agent = tls ? new https.Agent({ ...pool, ...tls }) : new http.Agent(pool);
    this.#upgrades = tls ? new https.Agent({ ...tls, keepAlive: false }) : new http.Agent({ keepAlive: false });
  }

  /** Drops every connection; what is under way fails. */
  close(): void {
    this.#closed = true;
    for (const request of this.#requests) request.destroy(new ShardConnectionError("the Shard was closed"));
    for (const socket of this.#streams) socket.destroy();
    this.#agent.destroy();
    this.#upgrades.destroy();
  }

  /** Sends a request and reads its JSON; undefined when the answer has no body. */
  async json(method: string, path: string, options: RequestOptions = {}): Promise<unknown> {
    const answer = await this.open(method, path, options);
    try {
      const text = (await answer.all(maxAnswer)).toString("utf8");
      if (text === "") return undefined;
      return JSON.parse(text) as unknown;
    } catch (error) {
      if (error instanceof SyntaxError) throw new ProtocolError(`the answer to ${method} ${path} is not JSON`);
      throw error;
    }
  }

  /** Sends a request and returns its successful answer, whose body is still to come. Throws what the server refuses. */
  async open(method: string, path: string, options: RequestOptions = {}): Promise<Answer> {
    const exchange = this.#exchange(method, path, options);
    for (let again = false; ; again = true) {
      try {
        return await exchange();
      } catch (error) {
        // A pooled connection may have been closed just as it was used. Only what changes nothing is sent twice.
        if (again || !(error instanceof StaleConnection) || (method !== "GET" && method !== "HEAD")) {
          throw error instanceof StaleConnection ? error.failure : error;
        }
      }
    }
  }

  #exchange(method: string, path: string, options: RequestOptions): () => Promise<Answer> {
    const { signal, waits = false } = options;
    const json = options.json === undefined ? undefined : Buffer.from(JSON.stringify(options.json));
    const body: Body | undefined = json === undefined ? options.body : { type: "application/json", length: json.length, chunks: [json] };
    return async () => {
      signal?.throwIfAborted();
      const headers: http.OutgoingHttpHeaders = {};
      if (body !== undefined) {
        headers["Content-Type"] = body.type;
        if (body.length === undefined) headers["Transfer-Encoding"] = "chunked";
        else headers["Content-Length"] = body.length;
      } else if (method !== "GET" && method !== "HEAD") {
        headers["Content-Length"] = 0;
      }
      const asks = body !== undefined && (body.length === undefined || body.length > smallBody);
      if (asks) headers["Expect"] = "100-continue";
      const request = this.#request(method, path + query(options.query), headers, this.#agent);
      const guard = new Guard(request, this.#failure, signal, waits, this.#alive);
      const answered = new Promise<http.IncomingMessage>((resolve, reject) => {
        request.on("response", resolve);
        request.on("error", (error) => {
          const failure = guard.explain(error);
          const stale = request.reusedSocket && failure instanceof ShardConnectionError && failure.cause === error;
          reject(stale ? new StaleConnection(failure) : failure);
        });
      });
      answered.catch(() => undefined);
      try {
        if (body === undefined) request.end();
        else await send(request, body, answered, asks, guard);
        const message = await answered;
        const answer = new Answer(message, guard);
        const status = message.statusCode ?? 0;
        if (status >= 200 && status < 300) return answer;
        throw refusal(status, await answer.all(1 << 20), method === "HEAD");
      } catch (error) {
        guard.release();
        request.destroy();
        throw error;
      }
    };
  }

  /** Opens a WebSocket. A refusal is thrown like any other. */
  async stream(path: string, options: { query?: Record<string, string | boolean | undefined>; signal?: AbortSignal | undefined } = {}): Promise<Stream> {
    const { signal } = options;
    signal?.throwIfAborted();
    const key = newKey();
    const headers = { Connection: "Upgrade", Upgrade: "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": key };
    const request = this.#request("GET", path + query(options.query), headers, this.#upgrades);
    const guard = new Guard(request, this.#failure, signal, false, this.#alive);
    try {
      return await new Promise<Stream>((resolve, reject) => {
        request.on("error", (error) => reject(guard.explain(error)));
        request.on("response", (message) => {
          const status = message.statusCode ?? 0;
          new Answer(message, guard).all(1 << 20).then((body) => {
            reject(status >= 300 ? refusal(status, body, false) : new ProtocolError(`the server answered ${status} where it was to open a stream`));
          }, reject);
        });
        request.on("upgrade", (message, socket: Socket, head) => {
          const { "sec-websocket-accept": accept, "sec-websocket-extensions": extensions, "sec-websocket-protocol": protocol } = message.headers;
          if (accept !== acceptOf(key) || extensions !== undefined || protocol !== undefined) {
            socket.destroy();
            reject(new ProtocolError("the server opened a stream that is not the one asked for"));
            return;
          }
          this.#streams.add(socket);
          socket.once("close", () => this.#streams.delete(socket));
          resolve(new Stream(socket, head, { probe: this.#alive, beat: bounds.beat }));
        });
        request.end();
      });
    } catch (error) {
      request.destroy();
      throw error;
    } finally {
      guard.release();
    }
  }

  #request(method: string, path: string, headers: http.OutgoingHttpHeaders, agent: http.Agent): http.ClientRequest {
    if (this.#closed) throw new Error("this Shard is closed");
    const { host, port, secure, apiKey, remote } = this.#settings;
    const request = (secure ? https : http).request({
      agent,
      host,
      port,
      method,
      path,
      headers: {
        Host: remote.slice(remote.indexOf("://") + 3),
        Authorization: `Bearer ${apiKey}`,
        "User-Agent": `useshards-typescript/${packageVersion}`,
        Accept: "*/*",
        ...headers,
      },
    });
    this.#requests.add(request);
    request.once("close", () => this.#requests.delete(request));
    request.once("upgrade", () => this.#requests.delete(request));
    // A host that vanished without a word is noticed even where nothing is sent.
    request.once("socket", (socket) => socket.setKeepAlive(true, 10_000));
    return request;
  }

  /** Resolves when the server answers, be it with a refusal. */
  readonly #alive = async (): Promise<void> => {
    try {
      await this.json("GET", "/v0/version", { signal: AbortSignal.timeout(2 * bounds.beat) });
    } catch (error) {
      if (!(error instanceof ShardError) || error instanceof ShardConnectionError) throw error;
    }
  };

  /** What a failed exchange means to the caller. The server is named, the request is not. */
  readonly #failure = (error: NodeJS.ErrnoException): Error => {
    if (error instanceof ShardError) return error;
    const { remote } = this.#settings;
    const code = error.code ?? "";
    if (code.startsWith("HPE_")) return new ProtocolError(`the answer of ${remote} is not HTTP that can be read`, { cause: error });
    if (error.syscall === "connect" || error.syscall === "getaddrinfo") {
      return new ShardConnectionError(`cannot reach ${remote}: ${unreachable[code] ?? error.message}`, { cause: error });
    }
    if (code.startsWith("ERR_TLS") || code.startsWith("ERR_SSL") || /CERT|SIGNATURE|ISSUER/.test(code)) {
      return new ShardConnectionError(`cannot trust ${remote}: ${error.message}`, { cause: error });
    }
    if (code === "ECONNRESET" || code === "EPIPE") {
      return new ShardConnectionError(`${remote} ended the connection before its answer was complete`, { cause: error });
    }
    return new ShardConnectionError(`the connection to ${remote} broke: ${error.message}`, { cause: error });
  };
}

const unreachable: Readonly<Record<string, string>> = {
  ECONNREFUSED: "nothing listens there",
  ENOTFOUND: "its name is not known",
  EAI_AGAIN: "its name cannot be looked up now",
  EHOSTUNREACH: "there is no way to the host",
  ENETUNREACH: "there is no way to the network",
  ETIMEDOUT: "the host does not answer",
};

/** A pooled connection that was gone when it was used. */
class StaleConnection extends Error {
  readonly failure: Error;
  constructor(failure: Error) {
    super(failure.message);
    this.failure = failure;
  }
}

/** Ends a request that is aborted, exceeds its bound, or waits for a server that is dead. */
class Guard {
  readonly #request: http.ClientRequest;
  readonly #failure: (error: NodeJS.ErrnoException) => Error;
  readonly #signal: AbortSignal | undefined;
  #why: { error: unknown } | undefined;
  #timer: NodeJS.Timeout | undefined;
  #waits = false;
  readonly #abort = (): void => this.#end(this.#signal?.reason);

  constructor(
    request: http.ClientRequest,
    failure: (error: NodeJS.ErrnoException) => Error,
    signal: AbortSignal | undefined,
    waits: boolean,
    alive: () => Promise<void>,
  ) {
    this.#request = request;
    this.#failure = failure;
    this.#signal = signal;
    signal?.addEventListener("abort", this.#abort, { once: true });
    if (!waits) {
      const bound = bounds.request;
      this.#timer = setTimeout(() => this.#end(new ShardConnectionError(`the server gave no answer within ${bound / 1000} s`)), bound);
      return;
    }
    this.#waits = true;
    const look = (): void => {
      alive().then(
        () => this.#timer?.refresh(),
        (error: unknown) => {
          if (this.#timer !== undefined) this.#end(new ShardConnectionError("the server no longer answers", { cause: error }));
        },
      );
    };
    this.#timer = setTimeout(look, 3 * bounds.beat).unref();
  }

  /** Something moved: the server is alive. It does not prolong a bound. */
  progress(): void {
    if (this.#waits) this.#timer?.refresh();
  }

  /** No longer guarded. */
  release(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    this.#signal?.removeEventListener("abort", this.#abort);
  }

  /** What an error of the request or its answer means: often it is only how our own decision shows. */
  explain(error: unknown): Error {
    if (this.#why !== undefined) return this.#why.error as Error;
    return this.#failure(error as NodeJS.ErrnoException);
  }

  #end(error: unknown): void {
    this.#why ??= { error };
    this.release();
    this.#request.destroy();
  }
}

/** A successful answer. Its body must be read, or let go of with `cancel`. */
export class Answer {
  readonly headers: http.IncomingHttpHeaders;
  readonly #message: http.IncomingMessage;
  readonly #guard: Guard;

  constructor(message: http.IncomingMessage, guard: Guard) {
    this.headers = message.headers;
    this.#message = message;
    this.#guard = guard;
    guard.progress();
  }

  /** The whole body, refused above the limit in bytes. */
  async all(limit: number): Promise<Buffer> {
    const chunks: Buffer[] = [];
    let size = 0;
    for await (const chunk of this.chunks()) {
      size += chunk.length;
      if (size > limit) throw new ProtocolError(`the server's answer has more than ${limit} bytes`);
      chunks.push(chunk);
    }
    return Buffer.concat(chunks);
  }

  /** The body as it comes. A body that was cut rejects, it never looks whole. */
  async *chunks(): AsyncGenerator<Buffer, void, void> {
    try {
      for await (const chunk of this.#message as AsyncIterable<Buffer>) {
        this.#guard.progress();
        yield chunk;
      }
      if (!this.#message.complete) throw Object.assign(new Error("aborted"), { code: "ECONNRESET" });
    } catch (error) {
      throw error instanceof ProtocolError ? error : this.#guard.explain(error);
    } finally {
      this.#guard.release();
    }
  }

  /** Drops the connection with what is still to come. */
  cancel(): void {
    this.#guard.release();
    this.#message.destroy();
  }
}

/** Sends a body, until it is sent or the server has answered before its end. */
async function send(request: http.ClientRequest, body: Body, answered: Promise<unknown>, asks: boolean, guard: Guard): Promise<void> {
  let over = false;
  const end = answered.then(
    () => void (over = true),
    () => void (over = true),
  );
  if (asks) {
    let timer: NodeJS.Timeout | undefined;
    const wanted = new Promise<void>((resolve) => {
      request.once("continue", resolve);
      timer = setTimeout(resolve, askPatience);
    });
    await Promise.race([wanted, end]);
    clearTimeout(timer);
  }
  if (over) return;
  for await (const chunk of body.chunks) {
    if (over) return;
    if (request.write(chunk)) continue;
    let done: (() => void) | undefined;
    const drained = new Promise<void>((resolve) => request.once("drain", (done = resolve)));
    await Promise.race([drained, end]);
    request.off("drain", done!);
    guard.progress();
  }
  if (!over) request.end();
}

function query(parameters: Record<string, string | boolean | undefined> | undefined): string {
  const given = Object.entries(parameters ?? {}).filter((entry): entry is [string, string | boolean] => entry[1] !== undefined);
  if (given.length === 0) return "";
  return `?${given.map(([name, value]) => `${name}=${encodeURIComponent(String(value))}`).join("&")}`;
}
