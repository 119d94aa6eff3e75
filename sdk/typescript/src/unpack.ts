/**
 * Unpacks a tar that a sandbox made below a local directory. The tar is hostile: nothing of it may land or lead outside of
 * that directory. It is checked as a whole before anything lands.
 */

import { randomBytes } from "node:crypto";
import { constants } from "node:fs";
import { link, lstat, mkdir, open, readlink, realpath, rename, rm, stat, symlink, unlink, utimes, chmod, type FileHandle } from "node:fs/promises";
import { UnsafeArchiveError } from "./errors.js";
import { cleanName, entries, nameFault, shown, type Entry, type ReadAt } from "./tar.js";

/** How much one archive may hold: bytes of files, and entries. */
export const limits = { bytes: 64 * 2 ** 30, entries: 1 << 20 } as const;

/** A temporary name that no archive can know. */
export function temporaryName(): string {
  return `.shard-${randomBytes(12).toString("hex")}.tmp`;
}

interface Landing extends Entry {
  /** Below the target, latin1; "" is the target. */
  readonly path: string;
  /** What a link holds; of a hard link, the path of its file. */
  readonly to: string;
  /** Where the contents begin in the tar. */
  readonly at: number;
}

/**
 * Unpacks a spooled tar of total bytes into an existing directory. Its single top entry becomes the directory itself.
 * Setuid and setgid are dropped, owners ignored; an existing directory keeps its mode unless `fresh` says that it was made
 * for this. On an error what has landed stays, but no link that leads out does.
 */
export async function unpack(spool: FileHandle, total: number, local: string, fresh: boolean, signal: AbortSignal | undefined): Promise<void> {
  const read = window(spool);
  for await (const _ of admissible(read, total)) signal?.throwIfAborted();
  const unpacker = new Unpacker(Buffer.from(await realpath(local)), spool, fresh);
  try {
    for await (const landing of admissible(read, total)) {
      signal?.throwIfAborted();
      await unpacker.land(landing);
    }
    await unpacker.finish();
  } finally {
    await unpacker.checkLinks();
  }
}

/** Reads a file through a small window, so that headers one after the other cost one read. */
function window(spool: FileHandle): ReadAt {
  const width = 64 << 10;
  let from = 0;
  let held = Buffer.alloc(0);
  return async (position, size) => {
    if (position < from || position + size > from + held.length) {
      const buffer = Buffer.allocUnsafe(Math.max(size, width));
      let filled = 0;
      while (filled < buffer.length) {
        const { bytesRead } = await spool.read(buffer, filled, buffer.length - filled, position + filled);
        if (bytesRead === 0) break;
        filled += bytesRead;
      }
      from = position;
      held = buffer.subarray(0, filled);
    }
    return held.subarray(position - from, position - from + size);
  };
}

/** The entries of a tar that may land, each checked on its own and against those before it. */
async function* admissible(read: ReadAt, total: number): AsyncGenerator<Landing, void, void> {
  let top: string | undefined;
  let bytes = 0;
  let count = 0;
  const files = new Set<string>();
  for await (const entry of entries(read, total)) {
    const refuse = (reason: string): UnsafeArchiveError => new UnsafeArchiveError(shown(entry.name), reason);
    if (++count > limits.entries) throw new UnsafeArchiveError("", `the archive has more than ${limits.entries} entries`);
    const fault = nameFault(entry.name);
    if (fault !== undefined) throw refuse(fault);
    const clean = cleanName(entry.name);
    top ??= clean === "" ? "" : clean.split("/")[0]!;
    const path = below(top, clean);
    if (path === undefined) throw refuse(`is not in the tree ${JSON.stringify(shown(top))} that was asked for`);
    if (path === "" && entry.type !== "dir") throw refuse("is not a directory");
    bytes += entry.size;
    if (bytes > limits.bytes) throw new UnsafeArchiveError("", "the archive holds more than 64 GiB of files");
    let to = entry.link;
    if (entry.type === "symlink") {
      if (to === "" || to.length >= 4096 || to.includes("\0")) throw refuse("is a symbolic link whose target is empty, too long or holds a NUL");
      if (to.startsWith("/")) throw refuse(`is a symbolic link to the absolute path ${shown(to)}`);
      if (climbs(path, to)) throw refuse(`is a symbolic link to ${shown(to)}, which is outside of the target directory`);
    } else if (entry.type === "hardlink") {
      const linkFault = nameFault(to);
      if (linkFault !== undefined) throw refuse(`is a hard link to ${shown(to)}, which ${linkFault}`);
      const file = below(top, cleanName(to));
      if (file === undefined || !files.has(file)) throw refuse(`is a hard link to ${shown(to)}, which is no file of this archive before it`);
      to = file;
    }
    if (entry.type === "file" || entry.type === "hardlink") files.add(path);
    else files.delete(path);
    yield { ...entry, path, to };
  }
}

/** A clean name without the top's, undefined when it is not in the top. */
function below(top: string, clean: string): string | undefined {
  if (top === "") return clean;
  if (clean === top) return "";
  return clean.startsWith(`${top}/`) ? clean.slice(top.length + 1) : undefined;
}

/** Whether a link's text, taken without looking at other links, leads above the target. */
function climbs(path: string, to: string): boolean {
  let depth = path.split("/").length - 1;
  for (const part of to.split("/")) {
    if (part === "" || part === ".") continue;
    depth += part === ".." ? -1 : 1;
    if (depth < 0) return true;
  }
  return false;
}

class Unpacker {
  readonly #root: Buffer;
  readonly #spool: FileHandle;
  /** Files that this unpack wrote, by path: device and inode. */
  readonly #files = new Map<string, string>();
  readonly #links = new Set<string>();
  /** Directories that this unpack made, with the entry that says how they are to look at the end. */
  readonly #made = new Map<string, Landing | undefined>();
  /** Directories known to exist within the target; forgotten when a link lands. */
  readonly #known = new Set<string>();

  constructor(root: Buffer, spool: FileHandle, fresh: boolean) {
    this.#root = root;
    this.#spool = spool;
    if (fresh) this.#made.set("", undefined);
  }

  async land(landing: Landing): Promise<void> {
    const { path, type } = landing;
    if (type === "dir") {
      await this.#directory(path, landing);
      if (this.#made.has(path)) this.#made.set(path, landing);
      return;
    }
    const slash = path.lastIndexOf("/");
    const parent = slash === -1 ? "" : path.slice(0, slash);
    await this.#directory(parent, landing);
    const temporary = this.#path(parent === "" ? temporaryName() : `${parent}/${temporaryName()}`);
    try {
      let id = "";
      if (type === "symlink") {
        await symlink(Buffer.from(landing.to, "latin1"), temporary);
      } else if (type === "hardlink") {
        id = this.#files.get(landing.to) ?? "";
        await link(this.#path(landing.to), temporary);
        if (identity(await lstat(temporary)) !== id) throw refused(landing, "is a hard link to a file that somebody else changed meanwhile");
      } else {
        id = await this.#file(landing, temporary);
      }
      await rename(temporary, this.#path(path)).catch((error: NodeJS.ErrnoException) => {
        throw error.code === "EISDIR" || error.code === "ENOTEMPTY" ? refused(landing, "needs a place where there is a directory") : error;
      });
      this.#links.delete(path);
      this.#files.delete(path);
      if (type === "symlink") {
        this.#links.add(path);
        this.#known.clear();
      } else {
        this.#files.set(path, id);
      }
    } finally {
      await rm(temporary, { force: true }); // a rename onto another name of the same file leaves both
    }
  }

  /** Gives the directories their modes and times, the innermost first. */
  async finish(): Promise<void> {
    for (const [path, landing] of [...this.#made].reverse()) {
      if (landing === undefined) continue;
      const at = this.#path(path);
      if (!(await lstat(at)).isDirectory()) throw refused(landing, "was changed by somebody else meanwhile");
      await utimes(at, landing.mtime, landing.mtime);
      await chmod(at, landing.mode & 0o1777);
    }
  }

  /**
   * Follows every link that landed, now that all are there: a chain of links that are harmless one by one can lead out.
   * Such links are removed.
   */
  async checkLinks(): Promise<void> {
    let first: UnsafeArchiveError | undefined;
    for (const path of this.#links) {
      if (await this.#staysInside(path)) continue;
      await unlink(this.#path(path));
      first ??= new UnsafeArchiveError(shown(path), "leads out of the target directory through a symbolic link");
    }
    if (first !== undefined) throw first;
  }

  async #file(landing: Landing, temporary: Buffer): Promise<string> {
    const file = await open(temporary, constants.O_WRONLY | constants.O_CREAT | constants.O_EXCL | constants.O_NOFOLLOW, 0o600);
    try {
      const buffer = Buffer.allocUnsafe(Math.min(Math.max(landing.size, 1), 1 << 20));
      for (let done = 0; done < landing.size; ) {
        const { bytesRead } = await this.#spool.read(buffer, 0, Math.min(buffer.length, landing.size - done), landing.at + done);
        if (bytesRead === 0) throw refused(landing, "was cut");
        for (let written = 0; written < bytesRead; ) {
          written += (await file.write(buffer, written, bytesRead - written)).bytesWritten;
        }
        done += bytesRead;
      }
      await file.chmod(landing.mode & 0o1777);
      await file.utimes(landing.mtime, landing.mtime);
      return identity(await file.stat());
    } finally {
      await file.close();
    }
  }

  /** Makes a directory and the missing ones above it, and sees to it that it is within the target. */
  async #directory(path: string, landing: Landing): Promise<void> {
    if (path === "" || this.#known.has(path)) return;
    const slash = path.lastIndexOf("/");
    await this.#directory(slash === -1 ? "" : path.slice(0, slash), landing);
    if (!(await this.#staysInside(path))) throw refused(landing, "leads out of the target directory through a symbolic link");
    try {
      await mkdir(this.#path(path), landing.type === "dir" && landing.path === path ? 0o700 : 0o755);
      this.#made.set(path, undefined);
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code !== "EEXIST") throw error;
      const found = await stat(this.#path(path)).catch(() => undefined);
      if (found?.isDirectory() !== true) throw refused(landing, "needs a directory where there is something else");
    }
    this.#known.add(path);
  }

  /** Whether a path, with every link followed as far as there is something, stays within the target. */
  async #staysInside(path: string): Promise<boolean> {
    const at: string[] = [];
    const todo = path.split("/");
    for (let hops = 0; todo.length > 0; ) {
      const part = todo.shift()!;
      if (part === "" || part === ".") continue;
      if (part === "..") {
        if (at.pop() === undefined) return false;
        continue;
      }
      at.push(part);
      let to: string;
      try {
        if (!(await lstat(this.#path(at.join("/")))).isSymbolicLink()) continue;
        to = (await readlink(this.#path(at.join("/")), { encoding: "buffer" })).toString("latin1");
      } catch {
        continue; // nothing there: what follows is taken as it is written
      }
      if (to.startsWith("/")) return false;
      if (++hops > 40) return true; // a loop leads nowhere
      at.pop();
      todo.unshift(...to.split("/"));
    }
    return true;
  }

  #path(path: string): Buffer {
    return path === "" ? this.#root : Buffer.concat([this.#root, Buffer.from(`/${path}`, "latin1")]);
  }
}

function refused(landing: Landing, reason: string): UnsafeArchiveError {
  return new UnsafeArchiveError(shown(landing.name), reason);
}

function identity(info: { dev: number; ino: number }): string {
  return `${info.dev}:${info.ino}`;
}
