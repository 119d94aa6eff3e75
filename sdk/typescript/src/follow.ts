/** Streams that are read one item at a time: they open at the first item and give everything back when left. */

import { asyncDispose } from "./dispose.js";
import { ProtocolError, ServerError, ShardConnectionError } from "./errors.js";
import { Fields } from "./records.js";
import type { Stream } from "./stream.js";
import { abortable } from "./waiting.js";
import { opcode } from "./websocket.js";

/**
 * What a follow method returns: an async iterator to be used with `for await`. Leaving the loop, `return()` and an abort
 * of its signal close the stream.
 */
export class Follow<T> implements AsyncIterableIterator<T>, AsyncDisposable {
  readonly #open: (signal: AbortSignal) => Promise<Stream>;
  readonly #read: (stream: Stream) => Promise<IteratorResult<T, undefined>>;
  readonly #signal: AbortSignal | undefined;
  readonly #controller = new AbortController();
  #stream: Promise<Stream> | undefined;
  #last: Promise<unknown> = Promise.resolve();
  #over = false;

  /** @internal */
  constructor(
    open: (signal: AbortSignal) => Promise<Stream>,
    read: (stream: Stream) => Promise<IteratorResult<T, undefined>>,
    signal: AbortSignal | undefined,
  ) {
    this.#open = open;
    this.#read = read;
    this.#signal = signal;
  }

  /**
   * Opens the stream now instead of at the first item, and returns this follow: what happens from then on is not missed.
   *
   * @example
   * await using changes = await sandbox.files.watch("/srv").open();
   * const before = await sandbox.files.list("/srv");
   */
  async open(): Promise<this> {
    if (this.#over) throw new Error("this follow is closed");
    try {
      this.#signal?.throwIfAborted();
      await abortable((this.#stream ??= this.#open(this.#controller.signal)), this.#signal);
    } catch (error) {
      this.#close();
      throw error;
    }
    return this;
  }

  /**
   * The next item. The first call opens the stream.
   *
   * @example
   * const { value, done } = await follow.next();
   */
  next(): Promise<IteratorResult<T, undefined>> {
    const item = this.#last.then(() => this.#next());
    this.#last = item.catch(() => undefined);
    return item;
  }

  async #next(): Promise<IteratorResult<T, undefined>> {
    if (this.#over) return { done: true, value: undefined };
    try {
      this.#signal?.throwIfAborted();
      this.#stream ??= this.#open(this.#controller.signal);
      const item = await abortable(this.#stream.then(this.#read), this.#signal);
      if (this.#over) return { done: true, value: undefined };
      if (item.done === true) this.#close();
      return item;
    } catch (error) {
      if (this.#over) return { done: true, value: undefined };
      this.#close();
      throw error;
    }
  }

  /**
   * Closes the stream, also while an item is waited for.
   *
   * @example
   * await follow.return();
   */
  async return(): Promise<IteratorResult<T, undefined>> {
    this.#close();
    return { done: true, value: undefined };
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async [asyncDispose](): Promise<void> {
    this.#close();
  }

  #close(): void {
    if (this.#over) return;
    this.#over = true;
    this.#controller.abort();
    this.#stream?.then(
      (stream) => stream.close(),
      () => undefined,
    );
  }
}

/** Reads a stream of records as text messages, which ends with a close of 1000. */
export function records<T>(read: (fields: Fields) => T, what: string): (stream: Stream) => Promise<IteratorResult<T, undefined>> {
  return async (stream) => {
    const message = await stream.next();
    if (message === undefined) {
      const { code = 1006, reason = "", cause } = stream.end ?? {};
      if (code === 1000) return { done: true, value: undefined };
      if (code === 1011) throw new ServerError(500, "internal", reason);
      throw new ShardConnectionError(`${what} ended early`, { cause });
    }
    if (message.opcode !== opcode.text) throw new ProtocolError(`${what} has a message that is not text`);
    let record: unknown;
    try {
      record = JSON.parse(message.data.toString("utf8"));
    } catch {
      throw new ProtocolError(`${what} has a message that is not JSON`);
    }
    return { done: false, value: read(new Fields(record, `a message of ${what}`)) };
  };
}
