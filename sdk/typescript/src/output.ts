/** What is kept of a command's output: the newest bytes of both streams together, and their text. */

/** How many of the newest bytes of stdout and stderr together a result keeps unless asked otherwise: 8 MiB. */
export const defaultOutputLimit: number = 8 << 20;

/** The two streams, by the byte that a message of theirs begins with. */
export type Channel = 1 | 2;

/** Small chunks of one stream are gathered up to this size, in bytes: output that came byte by byte costs no more. */
const segmentSize = 64 << 10;

interface Segment {
  readonly channel: Channel;
  buffer: Buffer;
  start: number;
  end: number;
}

/** Keeps the newest `limit` bytes of two streams, in the order in which they arrived. */
export class Output {
  readonly #limit: number;
  #segments: Segment[] = [];
  #first = 0; // segments before it are dropped; the array is cut now and then
  #held = 0;
  #cut = { 1: false, 2: false };

  constructor(limit: number) {
    this.#limit = limit;
  }

  /** Takes the next chunk of a stream, copies it, and drops what is too old. */
  add(channel: Channel, data: Uint8Array): void {
    if (data.length === 0) return;
    if (this.#limit === 0) {
      this.#cut[channel] = true;
      return;
    }
    const last = this.#segments.at(-1);
    if (last !== undefined && last.channel === channel && last.end + data.length <= segmentSize) {
      if (last.end + data.length > last.buffer.length) {
        const grown = Buffer.allocUnsafe(Math.min(segmentSize, Math.max(1024, 2 * (last.end + data.length))));
        last.buffer.copy(grown, 0, 0, last.end);
        last.buffer = grown;
      }
      last.buffer.set(data, last.end);
      last.end += data.length;
    } else {
      this.#segments.push({ channel, buffer: Buffer.from(data), start: 0, end: data.length });
    }
    this.#held += data.length;
    while (this.#held > this.#limit) {
      const oldest = this.#segments[this.#first]!;
      const drop = Math.min(this.#held - this.#limit, oldest.end - oldest.start);
      oldest.start += drop;
      this.#held -= drop;
      this.#cut[oldest.channel] = true;
      if (oldest.start === oldest.end) this.#first++;
    }
    if (this.#first > 1024 || this.#first === this.#segments.length) {
      this.#segments.splice(0, this.#first);
      this.#first = 0;
    }
  }

  /** The kept bytes of one stream. */
  data(channel: Channel): Buffer {
    const kept = this.#segments.slice(this.#first).filter((s) => s.channel === channel);
    return Buffer.concat(kept.map((s) => s.buffer.subarray(s.start, s.end)));
  }

  /**
   * The kept bytes of one stream as text: what is not UTF-8 becomes U+FFFD. A character that was cut at the front, here
   * or (lost) by the daemon, is one mark, not three.
   */
  text(channel: Channel, lost: boolean): string {
    const data = this.data(channel);
    let tail = 0;
    if (lost || this.#cut[channel]) {
      while (tail < Math.min(3, data.length) && (data[tail]! & 0xc0) === 0x80) tail++;
    }
    return (tail > 0 ? "\ufffd" : "") + data.toString("utf8", tail);
  }
}
