/** Packs a local directory into a tar, as it is read: nothing is held but one piece of one file. */

import { constants } from "node:fs";
import { lstat, open, readdir, readlink, stat } from "node:fs/promises";
import { UnknownLengthError } from "./errors.js";
import { end, header, padding, type Entry } from "./tar.js";

/** Files are read in pieces of this size, in bytes. */
export const pieceSize: number = 256 << 10;

/** Small blocks are gathered up to this size before they go out, in bytes. */
const gather = 64 << 10;

/**
 * The tar of what is in a directory, with the directory itself as ".". Hard links within the tree, symbolic links as they
 * are, times, permission bits and sticky are kept; owners, setuid and setgid are not. Sockets, fifos and devices are left
 * out. A file that shrinks while it is read is an UnknownLengthError.
 */
export async function* pack(local: string): AsyncGenerator<Buffer, void, void> {
  const top = Buffer.from(local);
  const linked = new Map<string, string>();
  let waiting: Buffer[] = [];
  let size = 0;
  for await (const chunk of walk(top, "./", await stat(top), linked)) {
    waiting.push(chunk);
    size += chunk.length;
    if (size < gather) continue;
    yield waiting.length === 1 ? chunk : Buffer.concat(waiting, size);
    waiting = [];
    size = 0;
  }
  yield Buffer.concat([...waiting, end()]);
}

type Stats = Awaited<ReturnType<typeof stat>>;

function entry(type: Entry["type"], name: string, info: Stats, link = ""): Buffer {
  const mtime = Math.round(Number(info.mtimeMs) * 1000) / 1e6;
  return header({ type, name, link, size: type === "file" ? Number(info.size) : 0, mode: Number(info.mode) & 0o1777, mtime });
}

async function* walk(path: Buffer, name: string, info: Stats, linked: Map<string, string>): AsyncGenerator<Buffer, void, void> {
  const names = await readdir(path, { encoding: "buffer" });
  yield entry("dir", name, info);
  const below = name === "./" ? "" : name;
  for (const base of names.sort(Buffer.compare)) {
    const child = Buffer.concat([path, slash, base]);
    const childName = below + base.toString("latin1");
    let found: Stats;
    try {
      found = await lstat(child);
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code === "ENOENT") continue; // removed since its directory was read
      throw error;
    }
    if (found.isDirectory()) yield* walk(child, `${childName}/`, found, linked);
    else if (found.isSymbolicLink()) yield entry("symlink", childName, found, (await readlink(child, { encoding: "buffer" })).toString("latin1"));
    else if (found.isFile()) yield* file(child, childName, linked);
  }
}

const slash = Buffer.from("/");

async function* file(path: Buffer, name: string, linked: Map<string, string>): AsyncGenerator<Buffer, void, void> {
  const handle = await open(path, constants.O_RDONLY | constants.O_NONBLOCK | constants.O_NOFOLLOW);
  try {
    const info = await handle.stat();
    if (!info.isFile()) throw new UnknownLengthError(`${path.toString()} was replaced while it was read`);
    if (info.nlink > 1) {
      const key = `${info.dev}:${info.ino}`;
      const first = linked.get(key);
      if (first !== undefined) {
        yield entry("hardlink", name, info, first);
        return;
      }
      linked.set(key, name);
    }
    yield entry("file", name, info);
    let left = info.size;
    while (left > 0) {
      const want = Math.min(left, pieceSize);
      const { bytesRead, buffer } = await handle.read(Buffer.allocUnsafe(want), 0, want, null);
      if (bytesRead === 0) throw new UnknownLengthError(`${path.toString()} shrank while it was read`);
      left -= bytesRead;
      yield buffer.subarray(0, bytesRead);
    }
    if (info.size % 512 !== 0) yield padding(info.size);
  } finally {
    await handle.close();
  }
}
