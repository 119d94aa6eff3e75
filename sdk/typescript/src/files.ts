/** The files of a sandbox, and copies between it and this machine. */

import { open, mkdir, rename, rm, rmdir, stat, unlink, type FileHandle } from "node:fs/promises";
import { constants } from "node:fs";
import { dirname, join } from "node:path";
import { ProtocolError, UnknownLengthError } from "./errors.js";
import { Follow, records } from "./follow.js";
import { octal } from "./inputs.js";
import { toFileEntry, toFileEvent, toFileInfo, type FileEntry, type FileEvent, type FileInfo } from "./models.js";
import { pack, pieceSize } from "./pack.js";
import { Fields } from "./records.js";
import type { Stream } from "./stream.js";
import { route, type Answer, type Transport } from "./transport.js";
import { temporaryName, unpack } from "./unpack.js";
import type { CallOptions } from "./waiting.js";

/** How a file or directory is made. */
export interface MakeOptions extends CallOptions {
  /** Permission bits, 0 to 0o777. Default 0o644 for a file, 0o755 for a directory, the local file's own for upload(). */
  mode?: number | undefined;
  /** Makes the missing parent directories. Default false: a missing one is a NotFoundError. */
  parents?: boolean | undefined;
  /** The user in the sandbox who does it and owns the result. Default: the sandbox's. */
  user?: string | undefined;
}

/** Received bytes are gathered up to this size before they are written, in bytes. */
const writeSize = 1 << 20;

/**
 * The files of one sandbox, as `sandbox.files`. Remote paths are absolute, and the sandbox must run.
 *
 * @example
 * await sandbox.files.write("/tmp/main.py", "print('hello')\n");
 * console.log(await sandbox.files.read("/tmp/main.py", { encoding: "utf8" }));
 */
export class Files {
  readonly #transport: Transport;
  readonly #sandbox: () => string;

  /** @internal */
  constructor(transport: Transport, sandbox: () => string) {
    this.#transport = transport;
    this.#sandbox = sandbox;
  }

  /**
   * Writes a file. It appears complete or not at all.
   *
   * @example
   * await sandbox.files.write("/srv/app/config.json", '{"debug": true}', { mode: 0o640, parents: true });
   */
  async write(path: string, data: string | Uint8Array, options: MakeOptions = {}): Promise<void> {
    if (typeof data !== "string" && !(data instanceof Uint8Array)) throw new TypeError("data must be a string or a Uint8Array");
    const bytes = typeof data === "string" ? Buffer.from(data, "utf8") : data;
    await this.#put(path, bytes.length, pieces(bytes), options);
  }

  /**
   * Reads a whole file: as bytes, or with an encoding as text, in which what is not UTF-8 shows as U+FFFD.
   *
   * @example
   * const text = await sandbox.files.read("/etc/hostname", { encoding: "utf8" });
   */
  async read(path: string, options: CallOptions & { encoding: "utf8" | "utf-8" }): Promise<string>;
  async read(path: string, options?: CallOptions & { encoding?: undefined }): Promise<Uint8Array>;
  async read(path: string, options: CallOptions & { encoding?: "utf8" | "utf-8" | undefined } = {}): Promise<string | Uint8Array> {
    const { encoding, signal } = options;
    if (encoding !== undefined && encoding !== "utf8" && encoding !== "utf-8") throw new TypeError('encoding must be "utf8"');
    const answer = await this.#transport.open("GET", this.#path("files"), { query: { path }, waits: true, signal });
    const bytes = await answer.all(Number.MAX_SAFE_INTEGER);
    return encoding === undefined ? new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.length) : bytes.toString("utf8");
  }

  /**
   * What a path is; of a link, the link itself.
   *
   * @example
   * const { size } = await sandbox.files.stat("/etc/passwd");
   */
  async stat(path: string, options: CallOptions = {}): Promise<FileInfo> {
    const answer = await this.#transport.open("HEAD", this.#path("files"), { query: { path }, signal: options.signal });
    await answer.all(0);
    return stated(answer);
  }

  /**
   * Lists a directory, by name.
   *
   * @example
   * const names = (await sandbox.files.list("/etc")).map((entry) => entry.name);
   */
  async list(path: string, options: CallOptions = {}): Promise<FileEntry[]> {
    const record = await this.#transport.json("GET", this.#path("ls"), { query: { path }, signal: options.signal });
    return new Fields(record, "a directory").objects("entries", toFileEntry, "an entry");
  }

  /**
   * Makes a directory. With `parents`, one that is there already is no error.
   *
   * @example
   * await sandbox.files.mkdir("/srv/app/data", { parents: true });
   */
  async mkdir(path: string, options: MakeOptions = {}): Promise<void> {
    const json = { path, mode: octal(options.mode), parents: options.parents ?? false, user: options.user };
    await this.#transport.json("POST", this.#path("mkdir"), { json, signal: options.signal });
  }

  /**
   * Removes a path; of a link, the link. A directory that is not empty needs `recursive`.
   *
   * @example
   * await sandbox.files.remove("/srv/app/data", { recursive: true });
   */
  async remove(path: string, options: CallOptions & { recursive?: boolean | undefined } = {}): Promise<void> {
    const query = { path, recursive: options.recursive || undefined };
    await this.#transport.json("DELETE", this.#path("files"), { query, waits: true, signal: options.signal });
  }

  /**
   * Yields what changes below a directory, as it happens, until the directory or the sandbox ends. It begins at the first
   * item, or with open(). An event "overflow" says that some are missing: list the tree again. A client that takes nothing
   * for 30 s is cut. Links below the directory are not followed; at most 8192 directories are watched.
   *
   * @param options.recursive also everything below its directories. Default true.
   * @throws NotFoundError, InvalidRequestError, ConflictError; ShardConnectionError when the stream breaks: what has
   * changed since is not known.
   * @example
   * for await (const event of sandbox.files.watch("/srv")) console.log(event.type, event.path);
   */
  watch(path: string, options: CallOptions & { recursive?: boolean | undefined } = {}): Follow<FileEvent> {
    const query = { path, recursive: (options.recursive ?? true) || undefined };
    const open = (signal: AbortSignal): Promise<Stream> => this.#transport.stream(this.#path("watch"), { query, signal });
    return new Follow(open, records(toFileEvent, "the watch's stream"), options.signal);
  }

  /**
   * Copies a local file in, without holding it in memory.
   *
   * @throws UnknownLengthError when the file grows or shrinks meanwhile, or is no regular file: nothing is written then.
   * @example
   * await sandbox.files.upload("model.bin", "/srv/model.bin");
   */
  async upload(local: string, remote: string, options: MakeOptions = {}): Promise<void> {
    const file = await open(local, constants.O_RDONLY | constants.O_NONBLOCK);
    try {
      const info = await file.stat();
      if (info.isDirectory()) throw fault("EISDIR", `${local} is a directory: use uploadDir()`);
      if (!info.isFile()) throw new UnknownLengthError(`${local} is no regular file, so its length is not known`);
      const mode = options.mode ?? info.mode & 0o777;
      await this.#put(remote, info.size, exactly(file, info.size, local), { ...options, mode });
    } finally {
      await file.close();
    }
  }

  /**
   * Copies a file out, without holding it in memory. It appears complete, with its permission bits, or not at all.
   *
   * @example
   * await sandbox.files.download("/srv/result.csv", "result.csv");
   */
  async download(remote: string, local: string, options: CallOptions = {}): Promise<void> {
    const { signal } = options;
    signal?.throwIfAborted();
    if ((await stat(local).catch(() => undefined))?.isDirectory() === true) throw fault("EISDIR", `${local} is a directory`);
    const temporary = join(dirname(local), temporaryName());
    const file = await open(temporary, "wx", 0o600);
    try {
      try {
        const answer = await this.#transport.open("GET", this.#path("files"), { query: { path: remote }, waits: true, signal });
        const { mode } = whatever(answer, () => stated(answer));
        await store(answer, file);
        await file.chmod(mode & 0o777);
      } finally {
        await file.close();
      }
      signal?.throwIfAborted();
      await rename(temporary, local);
    } catch (error) {
      await rm(temporary, { force: true });
      throw error;
    }
  }

  /**
   * Copies what is in a local directory into exactly this directory of the sandbox, which is made when only the last part
   * of its path is missing. Everything belongs to `user`. Sockets, fifos and devices are left out.
   *
   * @example
   * await sandbox.files.uploadDir("site", "/srv/site");
   */
  async uploadDir(local: string, remote: string, options: CallOptions & { user?: string | undefined } = {}): Promise<void> {
    if (!(await stat(local)).isDirectory()) throw fault("ENOTDIR", `${local} is not a directory`);
    const body = { type: "application/x-tar", length: undefined, chunks: pack(local) };
    const query = { path: remote, user: options.user };
    await this.#transport.json("PUT", this.#path("archive"), { query, body, waits: true, signal: options.signal });
  }

  /**
   * Copies what is in a directory of the sandbox into exactly this local directory, which is made when it is missing.
   * What could reach beyond it is refused before anything lands; setuid, setgid and owners are dropped.
   *
   * @throws UnsafeArchiveError
   * @example
   * await sandbox.files.downloadDir("/srv/site", "site");
   */
  async downloadDir(remote: string, local: string, options: CallOptions = {}): Promise<void> {
    const { signal } = options;
    signal?.throwIfAborted();
    const fresh = await makeDirectory(local);
    try {
      const name = join(local, temporaryName());
      const spool = await open(name, "wx+", 0o600);
      try {
        await unlink(name); // from here on it needs no cleaning, whatever happens
        const answer = await this.#transport.open("GET", this.#path("archive"), { query: { path: remote }, waits: true, signal });
        if (whatever(answer, () => stated(answer)).type !== "dir") {
          answer.cancel();
          throw fault("ENOTDIR", `${remote} in the sandbox is not a directory`);
        }
        await unpack(spool, await store(answer, spool), local, fresh, signal);
      } finally {
        await spool.close();
      }
    } catch (error) {
      if (fresh) await rmdir(local).catch(() => undefined); // only if nothing has landed
      throw error;
    }
  }

  async #put(path: string, length: number, chunks: AsyncIterable<Uint8Array> | Iterable<Uint8Array>, options: MakeOptions): Promise<void> {
    const query = { path, mode: octal(options.mode), user: options.user, parents: options.parents || undefined };
    const body = { type: "application/octet-stream", length, chunks };
    await this.#transport.json("PUT", this.#path("files"), { query, body, waits: true, signal: options.signal });
  }

  #path(what: string): string {
    return route("sandboxes", this.#sandbox(), what);
  }
}

/** Reads the header that says what a path is. */
function stated(answer: Answer): FileInfo {
  const header = answer.headers["x-shard-stat"];
  try {
    return toFileInfo(new Fields(JSON.parse(String(header)), "what the path is"));
  } catch (error) {
    if (error instanceof SyntaxError) throw new ProtocolError("the server's answer does not say what the path is");
    throw error;
  }
}

/** Lets go of the answer when what is done with it fails. */
function whatever<T>(answer: Answer, work: () => T): T {
  try {
    return work();
  } catch (error) {
    answer.cancel();
    throw error;
  }
}

/** Writes an answer's body to a file, and says how many bytes that were. */
async function store(answer: Answer, file: FileHandle): Promise<number> {
  let total = 0;
  let waiting: Buffer[] = [];
  let size = 0;
  const flush = async (): Promise<void> => {
    let left = waiting;
    waiting = [];
    size = 0;
    while (left.length > 0) {
      let { bytesWritten } = await file.writev(left);
      while (left.length > 0 && bytesWritten >= left[0]!.length) bytesWritten -= left.shift()!.length;
      if (left.length > 0) left = [left[0]!.subarray(bytesWritten), ...left.slice(1)];
    }
  };
  for await (const chunk of answer.chunks()) {
    waiting.push(chunk);
    size += chunk.length;
    total += chunk.length;
    if (size >= writeSize) await flush();
  }
  await flush();
  return total;
}

function* pieces(bytes: Uint8Array): Generator<Uint8Array, void, void> {
  for (let at = 0; at < bytes.length; at += pieceSize) yield bytes.subarray(at, at + pieceSize);
}

/** A file's contents, if they are exactly size bytes: the last piece is held back until that is certain. */
async function* exactly(file: FileHandle, size: number, name: string): AsyncGenerator<Uint8Array, void, void> {
  let held: Uint8Array | undefined;
  let done = 0;
  for (;;) {
    const { bytesRead, buffer } = await file.read(Buffer.allocUnsafe(pieceSize), 0, pieceSize, null);
    if (bytesRead === 0) break;
    done += bytesRead;
    if (done > size) throw new UnknownLengthError(`${name} grew while it was sent`);
    if (held !== undefined) yield held;
    held = buffer.subarray(0, bytesRead);
  }
  if (done < size) throw new UnknownLengthError(`${name} shrank while it was sent`);
  if (held !== undefined) yield held;
}

/** Makes a directory unless it is there; says whether it was made. */
async function makeDirectory(path: string): Promise<boolean> {
  try {
    await mkdir(path);
    return true;
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== "EEXIST") throw error;
    if (!(await stat(path)).isDirectory()) throw fault("ENOTDIR", `${path} is not a directory`);
    return false;
  }
}

/** An error as Node's file system makes them. */
function fault(code: string, message: string): Error {
  return Object.assign(new Error(`${code}: ${message}`), { code });
}
