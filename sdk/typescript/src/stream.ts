/**
 * One WebSocket of the API over a connected socket: messages in order with back-pressure, heartbeats, and a clean way
 * out. Knows nothing of what the messages mean.
 */

import type { Socket } from "node:net";
import { ProtocolError, ShardConnectionError } from "./errors.js";
import { Decoder, closeReason, encode, encodeClose, opcode, type Message } from "./websocket.js";

/** How many bytes may wait for a slow consumer before the socket is no longer read. */
const highWater = 1 << 20;

/** How long the other side may take to answer a close, in ms. */
const closing = 5_000;

/** How a stream ended. 1006 means without a close frame: it broke. */
export interface StreamEnd {
  readonly code: number;
  readonly reason: string;
  readonly cause?: unknown;
}

export interface StreamOptions {
  /** Whether the server answers at all, by another connection: resolves when it does. */
  probe: () => Promise<unknown>;
  /** How often to look for a sign of life, in ms. After four silent beats and unanswered pings the server counts as dead. */
  beat: number;
}

export class Stream {
  readonly #socket: Socket;
  readonly #options: StreamOptions;
  readonly #decoder = new Decoder();
  #queue: Message[] = [];
  #queued = 0;
  #wake: (() => void) | undefined;
  #end: StreamEnd | undefined;
  #failure: Error | undefined;
  #leaving = false;
  #heard = performance.now();
  #sent = 0; // messages sent so far
  #reached = 0; // of these, how many the server has taken for sure: a pong came back from behind them
  #probing = false;
  #beaten = performance.now(); // when the pulse was last felt
  readonly #timer: NodeJS.Timeout;

  /** @param head What came with the answer that opened the stream. */
  constructor(socket: Socket, head: Buffer, options: StreamOptions) {
    this.#socket = socket;
    this.#options = options;
    this.#timer = setInterval(() => this.#beat(), options.beat).unref();
    socket.setTimeout(0);
    socket.setNoDelay(true);
    socket.on("data", (chunk: Buffer) => this.#take(chunk));
    socket.on("error", (cause) => this.#ended({ code: 1006, reason: "", cause }));
    socket.on("end", () => this.#ended({ code: 1006, reason: "" }));
    socket.on("close", () => this.#ended({ code: 1006, reason: "" }));
    if (head.length > 0) this.#take(head);
    socket.resume();
  }

  /** The next message, undefined when there will be none: `end` says why. Rejects when the server breaks the rules or is dead. */
  async next(): Promise<Message | undefined> {
    for (;;) {
      const message = this.#queue.shift();
      if (message !== undefined) {
        this.#queued -= message.data.length;
        if (this.#socket.isPaused() && this.#queued < highWater / 2 && this.#end === undefined) {
          this.#heard = performance.now(); // what came while nobody read is heard only now
          this.#socket.resume();
        }
        return message;
      }
      if (this.#failure !== undefined) throw this.#failure;
      if (this.#end !== undefined || this.#leaving) return undefined;
      await new Promise<void>((resolve) => (this.#wake = resolve));
    }
  }

  /** How it ended, undefined while it has not. */
  get end(): StreamEnd | undefined {
    return this.#end;
  }

  /** What the server did wrong, when that is why it ended. */
  get failure(): Error | undefined {
    return this.#failure;
  }

  /** Sends one binary message: head and payload together. Resolves when there is room for more; false when the stream is over. */
  async send(head: Uint8Array, payload: Uint8Array): Promise<boolean> {
    if (this.#end !== undefined || this.#failure !== undefined || this.#leaving) return false;
    this.#sent++;
    if (!this.#socket.write(encode(opcode.binary, payload, head))) await this.#drained();
    return this.#end === undefined && this.#failure === undefined && !this.#leaving;
  }

  /** Leaves: nothing more is delivered. The other side has a few seconds to take its leave too. Repeated calls do nothing. */
  close(): void {
    if (this.#leaving) return;
    this.#leaving = true;
    this.#queue = [];
    this.#queued = 0;
    this.#awake();
    clearInterval(this.#timer);
    if (this.#end !== undefined || this.#failure !== undefined || this.#socket.writableLength > 0) {
      this.destroy();
      return;
    }
    this.#socket.write(encodeClose(1000));
    this.#socket.resume();
    setTimeout(() => this.#socket.destroy(), closing).unref();
  }

  /** Drops the connection now. */
  destroy(): void {
    this.#leaving = true;
    this.#awake();
    clearInterval(this.#timer);
    this.#socket.destroy();
  }

  #take(chunk: Buffer): void {
    if (this.#end !== undefined) return;
    this.#heard = performance.now();
    try {
      this.#decoder.feed(chunk);
      for (let message = this.#decoder.next(); message !== undefined; message = this.#decoder.next()) {
        switch (message.opcode) {
          case opcode.ping:
            this.#socket.write(encode(opcode.pong, message.data));
            break;
          case opcode.pong:
            if (message.data.length === 4) this.#reached = Math.max(this.#reached, message.data.readUInt32BE(0));
            break;
          case opcode.close:
            if (!this.#leaving) this.#socket.write(encodeClose(1000));
            this.#ended(closeReason(message));
            return;
          default:
            if (this.#leaving) break;
            this.#queue.push(message);
            this.#queued += message.data.length;
            this.#awake();
        }
      }
    } catch (error) {
      this.#fail(error as Error);
    }
    if (this.#queued > highWater) this.#socket.pause();
  }

  #beat(): void {
    const { beat, probe } = this.#options;
    const now = performance.now();
    // A program that was busy for long has not read what came meanwhile.
    if (now - this.#beaten > 2 * beat) this.#heard = now;
    this.#beaten = now;
    if (this.#socket.isPaused()) return; // it is we who do not listen
    const silent = now - this.#heard;
    if (silent < 1.5 * beat) return;
    if (this.#socket.writableLength > 0 || this.#sent > this.#reached) {
      // A ping waits behind input that the command does not read, so silence says nothing: ask otherwise.
      if (this.#probing) return;
      this.#probing = true;
      probe()
        .then(
          () => (this.#heard = performance.now()),
          (error: unknown) => this.#fail(new ShardConnectionError("the server no longer answers", { cause: error })),
        )
        .finally(() => (this.#probing = false));
      if (this.#socket.writableLength > 0) return;
    } else if (silent > 4 * beat) {
      this.#fail(new ShardConnectionError(`the server gave no sign of life for ${Math.round(silent / 1000)} s`));
      return;
    }
    const count = Buffer.alloc(4);
    count.writeUInt32BE(this.#sent >>> 0);
    this.#socket.write(encode(opcode.ping, count));
  }

  #drained(): Promise<void> {
    return new Promise((resolve) => {
      const done = (): void => {
        this.#socket.off("drain", done);
        this.#socket.off("close", done);
        resolve();
      };
      this.#socket.on("drain", done);
      this.#socket.on("close", done);
    });
  }

  #fail(error: Error): void {
    this.#failure ??= error instanceof ShardConnectionError || error instanceof ProtocolError ? error : new ProtocolError(error.message);
    this.#ended({ code: 1006, reason: "", cause: error });
    this.#socket.destroy();
  }

  #ended(end: StreamEnd): void {
    if (this.#end !== undefined) return;
    this.#end = end;
    clearInterval(this.#timer);
    this.#awake();
    // The socket is half open until our own end: what is buffered goes out, and a peer that does not follow is dropped.
    this.#socket.end();
    if (!this.#socket.destroyed) {
      this.#socket.resume();
      setTimeout(() => this.#socket.destroy(), closing).unref();
    }
  }

  #awake(): void {
    const wake = this.#wake;
    this.#wake = undefined;
    wake?.();
  }
}
