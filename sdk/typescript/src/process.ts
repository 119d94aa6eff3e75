/** Named processes: programs that the sandbox's supervisor keeps running. */

import { Follow } from "./follow.js";
import { argv, environment, restartSpec } from "./inputs.js";
import { toProcessInfo, type ProcessInfo, type Restart } from "./models.js";
import { kind, lost, take } from "./messages.js";
import { Fields } from "./records.js";
import type { Stream } from "./stream.js";
import { route, type Transport } from "./transport.js";
import { abortable, type CallOptions } from "./waiting.js";

/** The longest log that logs() reads, in bytes; the daemon keeps 32 MiB. */
const maxLog = 128 << 20;

/** How a process runs. */
export interface RunOptions extends CallOptions {
  /** Up to 32 lowercase letters, digits, ".", "_" and "-". Default: the base name of the program. */
  name?: string | undefined;
  /** Variables added to the sandbox's environment for this process. */
  env?: Readonly<Record<string, string>> | undefined;
  /** The working directory; the sandbox's by default. */
  workdir?: string | undefined;
  /** A user name or uid; the sandbox's by default. */
  user?: string | undefined;
  /** When it is started again. Default: "unless-stopped". */
  restart?: Restart | undefined;
}

/**
 * A named process of a sandbox.
 *
 * @example
 * const ticker = await sandbox.run("for i in 1 2 3; do echo tick $i; done", { name: "ticker", restart: { policy: "no" } });
 * console.log((await ticker.wait()).status.exit);
 */
export class Process {
  /** The id of its sandbox. */
  readonly sandbox: string;
  readonly #transport: Transport;
  #info: ProcessInfo;

  /** @internal */
  constructor(transport: Transport, sandbox: string, info: ProcessInfo) {
    this.#transport = transport;
    this.sandbox = sandbox;
    this.#info = info;
  }

  /** Its name within the sandbox. */
  get name(): string {
    return this.#info.name;
  }

  /** The record that the last call on this handle returned. */
  get info(): ProcessInfo {
    return this.#info;
  }

  /**
   * Waits until the process has ended and its restart policy will not start it again. An abort leaves it running.
   *
   * @throws ShardConnectionError when the stream breaks
   * @example
   * const { status } = await process.wait({ signal: AbortSignal.timeout(60_000) });
   */
  async wait(options: CallOptions = {}): Promise<ProcessInfo> {
    const { signal } = options;
    const stream = await this.#transport.stream(this.#path("attach"), { signal });
    try {
      for (;;) {
        const message = await abortable(take(stream, "the process's stream"), signal);
        if (message === undefined) throw lost(stream, "the process's stream", "the process may still run: wait() again");
        if (message.kind === kind.last) return this.#took(message.json());
      }
    } finally {
      stream.close();
    }
  }

  /**
   * Ends the process and waits for its end: TERM, after 30 s KILL; with `force` KILL at once. Cancels its restarts.
   *
   * @example
   * await process.kill({ force: true });
   */
  async kill(options: CallOptions & { force?: boolean | undefined } = {}): Promise<void> {
    const json = { force: options.force === true };
    this.#took(await this.#transport.json("POST", this.#path("kill"), { json, waits: true, signal: options.signal }));
  }

  /**
   * Reads the output of all its runs as text. The daemon keeps a bounded log: of a long one, the end.
   *
   * @example
   * console.log(await process.logs());
   */
  async logs(options: CallOptions = {}): Promise<string> {
    const answer = await this.#transport.open("GET", this.#path("logs"), { waits: true, signal: options.signal });
    return (await answer.all(maxLog)).toString("utf8");
  }

  /**
   * Yields the log from its start, then new output as it arrives, until the process ends or the sandbox stops.
   *
   * @example
   * for await (const chunk of process.followLogs()) console.log(Buffer.from(chunk).toString());
   */
  followLogs(options: CallOptions = {}): Follow<Uint8Array> {
    const open = (signal: AbortSignal): Promise<Stream> => this.#transport.stream(this.#path("logs"), { query: { follow: true }, signal });
    return new Follow(open, readLog, options.signal);
  }

  /**
   * Reads its record again.
   *
   * @example
   * const { restarts } = (await process.inspect()).status;
   */
  async inspect(options: CallOptions = {}): Promise<ProcessInfo> {
    return this.#took(await this.#transport.json("GET", this.#path(), { signal: options.signal }));
  }

  #took(record: unknown): ProcessInfo {
    this.#info = toProcessInfo(new Fields(record, "a process"));
    return this.#info;
  }

  #path(...more: string[]): string {
    return route("sandboxes", this.sandbox, "processes", this.#info.name, ...more);
  }
}

async function readLog(stream: Stream): Promise<IteratorResult<Uint8Array, undefined>> {
  for (;;) {
    const message = await take(stream, "the log's stream");
    if (message === undefined) throw lost(stream, "the log's stream");
    if (message.kind === kind.last) return { done: true, value: undefined };
    if (message.payload.length > 0) return { done: false, value: message.payload };
  }
}

/** Starts a process. */
export async function runProcess(transport: Transport, sandbox: string, command: string | readonly string[], options: RunOptions): Promise<Process> {
  const json = {
    command: argv(command),
    name: options.name,
    env: environment(options.env),
    workdir: options.workdir,
    user: options.user,
    restart: restartSpec(options.restart),
  };
  const record = await transport.json("POST", route("sandboxes", sandbox, "processes"), { json, signal: options.signal });
  return new Process(transport, sandbox, toProcessInfo(new Fields(record, "a process")));
}

/** The processes of one sandbox, as `sandbox.processes`. */
export class Processes {
  readonly #transport: Transport;
  readonly #sandbox: () => string;

  /** @internal */
  constructor(transport: Transport, sandbox: () => string) {
    this.#transport = transport;
    this.#sandbox = sandbox;
  }

  /**
   * Lists every process, in the order in which they were first run.
   *
   * @example
   * const names = (await sandbox.processes.list()).map((p) => p.name);
   */
  async list(options: CallOptions = {}): Promise<ProcessInfo[]> {
    const record = await this.#transport.json("GET", route("sandboxes", this.#sandbox(), "processes"), { signal: options.signal });
    return new Fields(record, "a list").objects("processes", toProcessInfo, "a process");
  }

  /**
   * Finds a process.
   *
   * @throws NotFoundError (no_process)
   * @example
   * const server = await sandbox.processes.get("server");
   */
  async get(name: string, options: CallOptions = {}): Promise<Process> {
    const record = await this.#transport.json("GET", route("sandboxes", this.#sandbox(), "processes", name), { signal: options.signal });
    return new Process(this.#transport, this.#sandbox(), toProcessInfo(new Fields(record, "a process")));
  }
}
