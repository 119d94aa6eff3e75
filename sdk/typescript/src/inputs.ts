/** What callers pass, checked and put into the form of the wire. Bad input is a TypeError or a RangeError. */

import { InvalidRequestError, ProtocolError } from "./errors.js";
import type { PortForward, Restart, TerminalSize } from "./models.js";
import { Fields } from "./records.js";
import type { RequestOptions, Transport } from "./transport.js";

/** A string runs under a shell, a list as it is. */
export function argv(command: string | readonly string[]): string[] {
  if (typeof command === "string") return ["/bin/sh", "-c", command];
  if (!Array.isArray(command) || command.length === 0 || !command.every((word) => typeof word === "string")) {
    throw new TypeError("the command must be a string, or a list of strings that is not empty");
  }
  return [...command];
}

/** Variables as the wire has them, undefined when there are none. */
export function environment(env: Readonly<Record<string, string>> | undefined): string[] | undefined {
  if (env === undefined || env === null) return undefined;
  const entries = Object.entries(env).map(([name, value]) => {
    if (name === "" || name.includes("=") || name.includes("\0")) {
      // A name with "=" would arrive as another one, so the server could not refuse it.
      throw new InvalidRequestError(400, "invalid_request", `env: ${JSON.stringify(name)} is no name: it is empty or holds "=" or a NUL`);
    }
    if (typeof value !== "string") throw new TypeError(`env: the value of ${name} must be a string`);
    return `${name}=${value}`;
  });
  return entries.length === 0 ? undefined : entries;
}

/** A whole number within bounds. */
export function whole(name: string, value: number, least: number, most: number = Number.MAX_SAFE_INTEGER): number {
  if (typeof value !== "number") throw new TypeError(`${name} must be a number`);
  if (!Number.isSafeInteger(value) || value < least || value > most) {
    const range = most === Number.MAX_SAFE_INTEGER ? `of ${least} or more` : `from ${least} to ${most}`;
    throw new RangeError(`${name} must be a whole number ${range}`);
  }
  return value;
}

export function terminalSize(size: TerminalSize): TerminalSize {
  return { rows: whole("rows", size.rows, 0, 65535), cols: whole("cols", size.cols, 0, 65535) };
}

export function portForward(forward: PortForward): object {
  return {
    host_port: whole("hostPort", forward.hostPort, 1, 65535),
    guest_port: whole("guestPort", forward.guestPort, 1, 65535),
    public: forward.public ?? false,
  };
}

export function restartSpec(restart: Restart | undefined): object | undefined {
  if (restart === undefined) return undefined;
  const { policy, retries = 0, backoff = 0 } = restart;
  if (!(backoff >= 0 && backoff <= 60)) throw new RangeError("backoff must be from 0 to 60 seconds");
  return { policy, retries: whole("retries", retries, 0) || undefined, backoff: backoff || undefined };
}

/** Permission bits in octal, as the wire has them. */
export function octal(mode: number | undefined): string | undefined {
  return mode === undefined ? undefined : whole("mode", mode, 0, 0o777).toString(8).padStart(4, "0");
}

/** A sandbox by reference or handle. */
export function reference(sandbox: string | { readonly id: string }): string {
  return typeof sandbox === "string" ? sandbox : sandbox.id;
}

/** Walks all pages of a list. */
export async function pages<T>(
  transport: Transport,
  path: string,
  key: string,
  read: (fields: Fields) => T,
  options: Pick<RequestOptions, "query" | "signal"> = {},
): Promise<{ items: T[]; warnings: string[] }> {
  const items: T[] = [];
  const warnings: string[] = [];
  const seen = new Set<string>();
  for (let cursor: string | undefined; ; ) {
    const page = new Fields(await transport.json("GET", path, { ...options, query: { ...options.query, cursor } }), "a list");
    items.push(...page.objects(key, read, "an item"));
    warnings.push(...page.texts("warnings"));
    const next = page.maybeText("next");
    if (next === null) return { items, warnings };
    if (seen.has(next)) throw new ProtocolError("the server's list does not end: it gave the same cursor twice");
    seen.add(next);
    cursor = next;
  }
}
