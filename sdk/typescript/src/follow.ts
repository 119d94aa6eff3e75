/** Streams that are read one item at a time: they open at the first item and give everything back when left. */

import { asyncDispose } from "./dispose.js";
import type { Stream } from "./stream.js";
import { abortable } from "./waiting.js";

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

  /** Closes the stream, also while an item is waited for. */
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
