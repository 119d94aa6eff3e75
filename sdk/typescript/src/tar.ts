/**
 * Tars as POSIX and GNU write them: a writer in pax form, and a reader that takes nothing on trust. Names are bytes, kept
 * as Buffers or as latin1 strings where they must be compared. Opens no file.
 *
 * Our own, since what is needed is small and the well-kept packages hold entries in memory, bring packages of their own,
 * or unpack with rules that are not ours.
 */

import { UnsafeArchiveError } from "./errors.js";

export const block = 512;

export type EntryType = "file" | "dir" | "symlink" | "hardlink";

/** One member of a tar. */
export interface Entry {
  readonly type: EntryType;
  /** As it stands in the tar, in latin1: one character a byte. */
  readonly name: string;
  /** What a link holds, likewise. */
  readonly link: string;
  /** Bytes of contents; 0 but for files. */
  readonly size: number;
  /** The low twelve bits. */
  readonly mode: number;
  /** Seconds since 1970. */
  readonly mtime: number;
}

/** The blocks before an entry's contents. Names and links are latin1; mtime may have a fraction. */
export function header(entry: Entry): Buffer {
  const records: [string, string][] = [];
  const name = Buffer.from(entry.name, "latin1");
  const link = Buffer.from(entry.link, "latin1");
  const ascii = (bytes: Buffer): boolean => bytes.every((b) => b > 0 && b < 0x80);
  if (name.length > 100 || !ascii(name)) records.push(["path", entry.name]);
  if (link.length > 100 || !ascii(link)) records.push(["linkpath", entry.link]);
  if (entry.size > 0o77777777777) records.push(["size", String(entry.size)]);
  const seconds = Math.floor(entry.mtime);
  if (seconds !== entry.mtime || seconds < 0 || seconds > 0o77777777777) records.push(["mtime", String(entry.mtime)]);
  const flag = { file: "0", dir: "5", symlink: "2", hardlink: "1" }[entry.type];
  const main = plain(flag, name.subarray(0, 100), link.subarray(0, 100), entry.size, entry.mode, Math.max(0, seconds));
  if (records.length === 0) return main;
  const body = Buffer.concat(records.map(([key, value]) => record(key, value)));
  const before = plain("x", Buffer.from("pax"), Buffer.alloc(0), body.length, 0o644, 0);
  return Buffer.concat([before, body, padding(body.length), main]);
}

/** The zeros after contents of a size. */
export function padding(size: number): Buffer {
  return Buffer.alloc((block - (size % block)) % block);
}

/** What ends a tar. */
export function end(): Buffer {
  return Buffer.alloc(2 * block);
}

function plain(flag: string, name: Buffer, link: Buffer, size: number, mode: number, mtime: number): Buffer {
  const h = Buffer.alloc(block);
  const number = (value: number, at: number, width: number): void => {
    const most = 8 ** (width - 1) - 1;
    h.write(Math.min(value, most).toString(8).padStart(width - 1, "0"), at, "latin1"); // what does not fit is in a record
  };
  name.copy(h, 0);
  number(mode, 100, 8);
  number(0, 108, 8);
  number(0, 116, 8);
  number(size, 124, 12);
  number(mtime, 136, 12);
  h.fill(" ", 148, 156);
  h.write(flag, 156, "latin1");
  link.copy(h, 157);
  h.write("ustar\x0000", 257, "latin1");
  h.write(`${checksum(h).toString(8).padStart(6, "0")}\0 `, 148, "latin1");
  return h;
}

function record(key: string, value: string): Buffer {
  const rest = ` ${key}=${value}\n`;
  let length = rest.length;
  while (String(length).length + rest.length !== length) length = String(length).length + rest.length;
  return Buffer.from(length + rest, "latin1");
}

/** The sum of a header's bytes, its own field counted as spaces. */
function checksum(h: Buffer): number {
  let sum = 8 * 0x20;
  for (let i = 0; i < block; i++) if (i < 148 || i >= 156) sum += h[i]!;
  return sum;
}

/** Reads size bytes at a position; fewer only at the end of the tar. */
export type ReadAt = (position: number, size: number) => Promise<Buffer>;

/** How long a name may be in all, in bytes: what PATH_MAX allows. */
const maxPath = 4096;

/** How much pax records and GNU names may take before an entry, in bytes. */
const maxExtra = 1 << 20;

/** Walks the entries of a tar. Ends only after the end mark; whatever is wrong is an UnsafeArchiveError. */
export async function* entries(read: ReadAt, total: number): AsyncGenerator<Entry & { readonly at: number }, void, void> {
  let at = 0;
  let global = new Map<string, string>();
  let local = new Map<string, string>();
  let last = "";
  const take = async (size: number): Promise<Buffer> => {
    const bytes = await read(at, size);
    if (bytes.length < size) throw new UnsafeArchiveError("", "the archive was cut: it ends before its end mark");
    at += size;
    return bytes;
  };
  for (;;) {
    const h = await take(block);
    if (h.every((b) => b === 0)) return finish(read, at, total);
    const stated = numeric(h, 148, 8);
    if (stated !== checksum(h)) {
      throw new UnsafeArchiveError("", last === "" ? "this is not a tar" : `the header after ${shown(last)} is damaged`);
    }
    const flag = String.fromCharCode(h[156]!);
    const magic = h.toString("latin1", 257, 263);
    let size = numeric(h, 124, 12);
    if (flag === "x" || flag === "g" || flag === "L" || flag === "K") {
      if (size > maxExtra) throw new UnsafeArchiveError("", "an entry has more than 1 MiB of names and attributes");
      const body = (await take(size + padding(size).length)).subarray(0, size);
      if (flag === "x") local = new Map([...local, ...records(body)]);
      else if (flag === "g") global = new Map([...global, ...records(body)]);
      else local.set(flag === "L" ? "path" : "linkpath", text(body));
      continue;
    }
    const attributes = new Map([...global, ...local]);
    local = new Map();
    const prefix = magic === "ustar\0" ? text(h.subarray(345, 500)) : "";
    const own = text(h.subarray(0, 100));
    const name = attributes.get("path") ?? (prefix === "" ? own : `${prefix}/${own}`);
    const link = attributes.get("linkpath") ?? text(h.subarray(157, 257));
    size = whole(attributes.get("size")) ?? size;
    last = name;
    if (!Number.isSafeInteger(size) || size < 0) throw new UnsafeArchiveError(shown(name), "has a size that cannot be");
    if (flag === "S" || [...attributes.keys()].some((key) => key.startsWith("GNU.sparse."))) {
      throw new UnsafeArchiveError(shown(name), "is stored with holes, which this client does not unpack");
    }
    const type = typeOf(flag, name);
    const contents = type === "file" ? size : 0;
    const mtime = Number(attributes.get("mtime") ?? numeric(h, 136, 12));
    yield { type, name, link, size: contents, mode: numeric(h, 100, 8) & 0o7777, mtime: Number.isFinite(mtime) ? mtime : 0, at };
    // Links and directories have no contents, but old writers give a size to some.
    at += flag === "0" || flag === "\0" || flag === "7" ? size + padding(size).length : 0;
    if (at > total) throw new UnsafeArchiveError("", "the archive was cut: it ends before its end mark");
  }
}

function typeOf(flag: string, name: string): EntryType {
  switch (flag) {
    case "0":
    case "\0":
    case "7":
      return name.endsWith("/") ? "dir" : "file";
    case "5":
      return "dir";
    case "2":
      return "symlink";
    case "1":
      return "hardlink";
    case "3":
    case "4":
      throw new UnsafeArchiveError(shown(name), "is a device node");
    case "6":
      throw new UnsafeArchiveError(shown(name), "is a fifo");
    default:
      throw new UnsafeArchiveError(shown(name), "has an unknown type");
  }
}

/** Only zeros may follow the end mark: something else would be a second tar that others read and we do not. */
async function finish(read: ReadAt, from: number, total: number): Promise<void> {
  if (total < from + block) throw new UnsafeArchiveError("", "the archive was cut: it ends before its end mark");
  for (let at = from; at < total; at += 1 << 20) {
    const chunk = await read(at, Math.min(1 << 20, total - at));
    if (!chunk.every((b) => b === 0)) throw new UnsafeArchiveError("", "something follows the end mark of the archive");
  }
}

/** A name as a person reads it. */
export function shown(name: string): string {
  return Buffer.from(name, "latin1").toString("utf8");
}

/** Why a name is not admissible, undefined when it is. */
export function nameFault(name: string): string | undefined {
  if (name === "") return "has no name";
  if (name.startsWith("/")) return "has an absolute name";
  if (name.length > maxPath) return "has a name of more than 4096 bytes";
  if (name.includes("\0")) return "has a NUL in its name";
  if (name.split("/").includes("..")) return 'has ".." in its name';
  return undefined;
}

/** An admissible name without empty and "." parts; "" is the top itself. */
export function cleanName(name: string): string {
  return name
    .split("/")
    .filter((part) => part !== "" && part !== ".")
    .join("/");
}

function text(field: Buffer): string {
  const nul = field.indexOf(0);
  return field.toString("latin1", 0, nul === -1 ? field.length : nul);
}

/** An octal number, or GNU's base 256; what is neither is NaN. */
function numeric(h: Buffer, at: number, width: number): number {
  if ((h[at]! & 0x80) !== 0) {
    if (h[at] === 0xff) return -1;
    let value = BigInt(h[at]! & 0x7f);
    for (let i = at + 1; i < at + width; i++) value = (value << 8n) | BigInt(h[i]!);
    return value > BigInt(Number.MAX_SAFE_INTEGER) ? NaN : Number(value);
  }
  const digits = h.toString("latin1", at, at + width).replace(/[\0 ]+$/, "").trimStart();
  return digits === "" ? 0 : /^[0-7]+$/.test(digits) ? parseInt(digits, 8) : NaN;
}

function whole(value: string | undefined): number | undefined {
  return value === undefined ? undefined : /^[0-9]{1,16}$/.test(value) ? Number(value) : NaN;
}

function records(body: Buffer): Map<string, string> {
  const found = new Map<string, string>();
  for (let at = 0; at < body.length; ) {
    const space = body.indexOf(0x20, at);
    const length = space === -1 ? NaN : Number(body.toString("latin1", at, space));
    const stop = at + length;
    const equals = body.indexOf(0x3d, space);
    if (!(Number.isInteger(length) && stop > space + 1 && stop <= body.length && body[stop - 1] === 0x0a && equals !== -1 && equals < stop)) {
      throw new UnsafeArchiveError("", "an entry has attributes that cannot be read");
    }
    found.set(body.toString("latin1", space + 1, equals), body.toString("latin1", equals + 1, stop - 1));
    at = stop;
  }
  return found;
}
