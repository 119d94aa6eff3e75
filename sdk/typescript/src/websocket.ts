/**
 * The client's half of RFC 6455, without I/O: bytes in, messages out, and the other way round. No extension is ever
 * offered, so the reserved bits are 0. Whatever breaks the rules is a ProtocolError.
 */

import { createHash, randomBytes } from "node:crypto";
import { ProtocolError } from "./errors.js";

export const opcode = { continuation: 0x0, text: 0x1, binary: 0x2, close: 0x8, ping: 0x9, pong: 0xa } as const;

/** The longest message that is taken, in bytes. The server sends at most 1 MiB and one byte. */
export const maxMessage: number = 4 << 20;

/** A whole message, or a control frame. */
export interface Message {
  readonly opcode: number;
  readonly data: Buffer;
}

/** A new Sec-WebSocket-Key. */
export function newKey(): string {
  return randomBytes(16).toString("base64");
}

/** The Sec-WebSocket-Accept that answers a key. */
export function acceptOf(key: string): string {
  return createHash("sha1").update(`${key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11`).digest("base64");
}

/** One final, masked frame of head (may be empty) and payload together. `mask` is four bytes, random unless given. */
export function encode(code: number, payload: Uint8Array, head: Uint8Array = empty, mask: Uint8Array = randomBytes(4)): Buffer {
  const size = head.length + payload.length;
  const width = size < 126 ? 0 : size < 65536 ? 2 : 8;
  const at = 2 + width + 4;
  const frame = Buffer.allocUnsafe(at + size);
  frame[0] = 0x80 | code;
  frame[1] = 0x80 | (width === 0 ? size : width === 2 ? 126 : 127);
  if (width === 2) frame.writeUInt16BE(size, 2);
  if (width === 8) frame.writeBigUInt64BE(BigInt(size), 2);
  frame.set(mask, 2 + width);
  frame.set(head, at);
  frame.set(payload, at + head.length);
  const [a, b, c, d] = [mask[0]!, mask[1]!, mask[2]!, mask[3]!];
  let i = at;
  for (const end = at + (size & ~3); i < end; i += 4) {
    frame[i]! ^= a;
    frame[i + 1]! ^= b;
    frame[i + 2]! ^= c;
    frame[i + 3]! ^= d;
  }
  for (let k = 0; i < frame.length; i++, k++) frame[i]! ^= mask[k]!;
  return frame;
}

const empty = new Uint8Array(0);

/** A close frame. */
export function encodeClose(code: number): Buffer {
  return encode(opcode.close, Uint8Array.of(code >> 8, code & 0xff));
}

/** Code and reason of a close message; 1005 when it carries none. */
export function closeReason(message: Message): { code: number; reason: string } {
  if (message.data.length === 0) return { code: 1005, reason: "" };
  return { code: message.data.readUInt16BE(0), reason: message.data.toString("utf8", 2) };
}

/** Turns what a server sent into messages. Feed it, then take messages until there is none. */
export class Decoder {
  #chunks: Buffer[] = [];
  #held = 0;
  #opcode = 0; // of the message whose fragments are being gathered; 0 is none
  #parts: Buffer[] = [];
  #gathered = 0;

  /** Takes the next bytes of the connection. */
  feed(data: Buffer): void {
    if (data.length === 0) return;
    this.#chunks.push(data);
    this.#held += data.length;
  }

  /** The next whole message or control frame, undefined when more bytes are needed. */
  next(): Message | undefined {
    for (;;) {
      const frame = this.#frame();
      if (frame === undefined) return undefined;
      if (frame.opcode >= opcode.close) {
        if (frame.opcode === opcode.close) checkClose(frame.data);
        return frame;
      }
      if ((frame.opcode === opcode.continuation) !== (this.#opcode !== 0)) {
        throw new ProtocolError("the server's stream has a fragment where none belongs");
      }
      this.#opcode ||= frame.opcode;
      this.#parts.push(frame.data);
      this.#gathered += frame.data.length;
      if (this.#gathered > maxMessage) throw tooLong();
      if (!frame.final) continue;
      const message = { opcode: this.#opcode, data: this.#parts.length === 1 ? this.#parts[0]! : Buffer.concat(this.#parts) };
      this.#opcode = this.#gathered = 0;
      this.#parts = [];
      if (message.opcode === opcode.text && !validText(message.data)) {
        throw new ProtocolError("the server sent text that is not UTF-8");
      }
      return message;
    }
  }

  #frame(): (Message & { final: boolean }) | undefined {
    if (this.#held < 2) return undefined;
    const start = this.#peek(Math.min(10, this.#held));
    const [first, second] = [start[0]!, start[1]!];
    const code = first & 0x0f;
    const final = (first & 0x80) !== 0;
    let size = second & 0x7f;
    let at = 2;
    if ((first & 0x70) !== 0) throw new ProtocolError("the server's frame has a reserved bit set");
    if ((second & 0x80) !== 0) throw new ProtocolError("the server's frame is masked");
    if (!(code <= opcode.binary || (code >= opcode.close && code <= opcode.pong))) {
      throw new ProtocolError(`the server's frame has the unknown opcode 0x${code.toString(16)}`);
    }
    if (code >= opcode.close && (size > 125 || !final)) {
      throw new ProtocolError("the server's control frame is too long or fragmented");
    }
    if (size >= 126) {
      at += size === 126 ? 2 : 8;
      if (start.length < at) return undefined;
      const long = size === 126 ? BigInt(start.readUInt16BE(2)) : start.readBigUInt64BE(2);
      if (long > BigInt(maxMessage)) throw tooLong();
      size = Number(long);
    }
    if (this.#held < at + size) return undefined;
    this.#take(at);
    return { final, opcode: code, data: this.#take(size) };
  }

  /** The first size bytes, left in place. */
  #peek(size: number): Buffer {
    if (this.#chunks[0]!.length < size) this.#chunks = [Buffer.concat(this.#chunks)];
    return this.#chunks[0]!.subarray(0, size);
  }

  /** The first size bytes, taken out. */
  #take(size: number): Buffer {
    this.#held -= size;
    const first = this.#chunks[0];
    if (first === undefined || size === 0) return Buffer.alloc(0);
    if (first.length > size) {
      this.#chunks[0] = first.subarray(size);
      return first.subarray(0, size);
    }
    const taken: Buffer[] = [];
    let missing = size;
    while (missing > 0) {
      const chunk = this.#chunks[0]!;
      if (chunk.length <= missing) {
        taken.push(chunk);
        missing -= chunk.length;
        this.#chunks.shift();
      } else {
        taken.push(chunk.subarray(0, missing));
        this.#chunks[0] = chunk.subarray(missing);
        missing = 0;
      }
    }
    return taken.length === 1 ? taken[0]! : Buffer.concat(taken, size);
  }
}

function tooLong(): ProtocolError {
  return new ProtocolError(`the server sent a message of more than ${maxMessage} bytes`);
}

function checkClose(payload: Buffer): void {
  if (payload.length === 0) return;
  const code = payload.length === 1 ? 0 : payload.readUInt16BE(0);
  if (code < 1000 || code === 1004 || code === 1005 || code === 1006 || (code > 1014 && code < 3000) || code > 4999) {
    throw new ProtocolError("the server's close frame has no valid code");
  }
  if (!validText(payload.subarray(2))) throw new ProtocolError("the server's close frame has a reason that is not UTF-8");
}

function validText(data: Buffer): boolean {
  try {
    strict.decode(data);
    return true;
  } catch {
    return false;
  }
}

const strict = new TextDecoder("utf-8", { fatal: true });
