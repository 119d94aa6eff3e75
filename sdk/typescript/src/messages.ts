/** The messages of commands and processes: a byte that says what they are, and the rest. */

import { ProtocolError, ShardConnectionError, detailError, errorObject } from "./errors.js";
import type { Stream } from "./stream.js";
import { opcode } from "./websocket.js";

/** What the first byte says. */
export const kind = { stdin: 0x00, stdout: 0x01, stderr: 0x02, last: 0x03, stdinClosed: 0x04, error: 0x05 } as const;

/** A message that the server sent: output, or the last one. */
export interface Received {
  readonly kind: 0x01 | 0x02 | 0x03;
  readonly payload: Uint8Array;
  /** The payload as JSON. */
  json(): unknown;
}

/**
 * The next message, undefined when the stream has ended without a last one. What the server ends the stream with instead
 * is thrown.
 */
export async function take(stream: Stream, what: string): Promise<Received | undefined> {
  const message = await stream.next();
  if (message === undefined) return undefined;
  const { buffer, byteOffset, length } = message.data;
  if (message.opcode !== opcode.binary || length === 0) throw new ProtocolError(`${what} has a message that is empty or text`);
  const json = (): unknown => {
    try {
      return JSON.parse(message.data.toString("utf8", 1));
    } catch {
      throw new ProtocolError(`${what} has a message that is not JSON`);
    }
  };
  const first = message.data[0];
  switch (first) {
    case kind.stdout:
    case kind.stderr:
    case kind.last:
      return { kind: first, payload: new Uint8Array(buffer, byteOffset + 1, length - 1), json };
    case kind.error: {
      const detail = errorObject(json());
      throw detail === undefined ? new ProtocolError(`${what} ends with an error that cannot be read`) : detailError(undefined, detail);
    }
    default:
      throw new ProtocolError(`${what} has a message of the unknown kind ${first}`);
  }
}

/** The error of a stream that has ended without its last message. */
export function lost(stream: Stream, what: string, then: string = ""): ShardConnectionError {
  const reason = stream.end?.reason || stream.failure?.message || "the connection was lost";
  const text = `${what} ended before its last message (${reason})`;
  return new ShardConnectionError(then === "" ? text : `${text}; ${then}`, { cause: stream.end?.cause });
}
