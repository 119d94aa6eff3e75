/**
 * Reads the server's JSON. A field that is missing or of another kind is a ProtocolError that names it; an unknown field
 * is nobody's business.
 */

import { ProtocolError } from "./errors.js";

/** One JSON object and what it is, for messages. */
export class Fields {
  readonly #value: Record<string, unknown>;
  readonly #what: string;

  constructor(value: unknown, what: string) {
    if (typeof value !== "object" || value === null || Array.isArray(value)) {
      throw new ProtocolError(`the server's answer holds something else where ${what} belongs`);
    }
    this.#value = value as Record<string, unknown>;
    this.#what = what;
  }

  /** A string that must be there. */
  text(key: string): string {
    return this.#must(key, this.maybeText(key));
  }

  /** A string, null when absent. */
  maybeText(key: string): string | null {
    const found = this.#get(key);
    if (found !== null && typeof found !== "string") throw this.#wrong(key);
    return found;
  }

  /** A whole number that must be there. */
  number(key: string): number {
    return this.#must(key, this.maybeNumber(key));
  }

  /** A whole number, null when absent. */
  maybeNumber(key: string): number | null {
    const found = this.maybeReal(key);
    if (found !== null && !Number.isInteger(found)) throw this.#wrong(key);
    return found;
  }

  /** A number, null when absent. */
  maybeReal(key: string): number | null {
    const found = this.#get(key);
    if (found !== null && typeof found !== "number") throw this.#wrong(key);
    return found;
  }

  /** A boolean, false when absent. */
  flag(key: string): boolean {
    const found = this.#get(key) ?? false;
    if (typeof found !== "boolean") throw this.#wrong(key);
    return found;
  }

  /** An RFC 3339 time that must be there. */
  time(key: string): Date {
    return this.#must(key, this.maybeTime(key));
  }

  /** An RFC 3339 time, null when absent. */
  maybeTime(key: string): Date | null {
    const text = this.maybeText(key);
    if (text === null) return null;
    // Date keeps milliseconds; further digits are cut, since not every parser takes them.
    const parts = /^(\d{4}-\d\d-\d\d)[Tt](\d\d:\d\d:\d\d)(\.\d{1,3})?\d*([Zz]|[+-]\d\d:\d\d)$/.exec(text);
    const time = new Date(parts === null ? NaN : `${parts[1]}T${parts[2]}${parts[3] ?? ""}${parts[4]!.toUpperCase()}`);
    if (Number.isNaN(time.getTime())) {
      throw new ProtocolError(`the server's answer has no valid time as ${key} of ${this.#what}`);
    }
    return time;
  }

  /** A list of strings, empty when absent. */
  texts(key: string): string[] {
    return this.#list(key).map((item) => {
      if (typeof item !== "string") throw this.#wrong(key);
      return item;
    });
  }

  /** An object that must be there. */
  object<T>(key: string, read: (fields: Fields) => T, what: string): T {
    return read(new Fields(this.#must(key, this.#get(key)), what));
  }

  /** An object, null when absent. */
  maybeObject<T>(key: string, read: (fields: Fields) => T, what: string): T | null {
    return this.#get(key) === null ? null : this.object(key, read, what);
  }

  /** A list of objects, empty when absent. */
  objects<T>(key: string, read: (fields: Fields) => T, what: string): T[] {
    return this.#list(key).map((item) => read(new Fields(item, what)));
  }

  #list(key: string): unknown[] {
    const found = this.#get(key) ?? [];
    if (!Array.isArray(found)) throw this.#wrong(key);
    return found;
  }

  #get(key: string): unknown {
    return Object.hasOwn(this.#value, key) ? (this.#value[key] ?? null) : null;
  }

  #must<T>(key: string, found: T): NonNullable<T> {
    if (found === null || found === undefined) throw new ProtocolError(`the server's answer has no ${key} in ${this.#what}`);
    return found;
  }

  #wrong(key: string): ProtocolError {
    return new ProtocolError(`the server's answer has something else as ${key} of ${this.#what}`);
  }
}
