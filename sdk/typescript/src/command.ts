/** One-off commands: the handle, and the attachment that carries a command's streams. */

import { CommandNotStartedError, ConflictError, NotFoundError, ShardConnectionError } from "./errors.js";
import { argv, environment, pages, terminalSize, whole } from "./inputs.js";
import { toCommandInfo, type CommandInfo, type CommandResult, type TerminalSize } from "./models.js";
import { kind, lost, take, type Received } from "./messages.js";
import { Output, defaultOutputLimit } from "./output.js";
import { Fields } from "./records.js";
import type { Stream } from "./stream.js";
import { route, type Transport } from "./transport.js";
import { abortable, pause, type CallOptions } from "./waiting.js";

/** Input goes in pieces of this size, in bytes. */
const piece = 64 << 10;

/** A command that somebody else just let go of may count as attached for a moment: how often and how long to try again, in ms. */
const again = { every: 50, during: 2_000 } as const;

/** How long a broken stream may take to be explained, in ms. */
const explaining = 5_000;

/** What becomes of a command's output. */
export interface OutputOptions {
  /** Called with each chunk of output as it arrives; a promise that it returns is waited for. An error ends the call, not the command. */
  onStdout?: ((chunk: Uint8Array) => unknown) | undefined;
  /** The same for stderr; nothing comes here from a terminal. */
  onStderr?: ((chunk: Uint8Array) => unknown) | undefined;
  /** How many of the newest bytes of stdout and stderr together the result keeps. Default 8 MiB, 0 keeps none. */
  outputLimitBytes?: number | undefined;
}

/** How a command runs. */
export interface ExecOptions extends CallOptions, OutputOptions {
  /** Variables added to the sandbox's environment for this command. */
  env?: Readonly<Record<string, string>> | undefined;
  /** The working directory. Default: the sandbox's. */
  workdir?: string | undefined;
  /** A user name or uid in the sandbox. Default: the sandbox's. */
  user?: string | undefined;
  /** The whole input, then its end. With `background`, true leaves it open for writeStdin(). Default: no input. */
  stdin?: string | Uint8Array | boolean | undefined;
  /** True or a size: runs the command on a terminal, whose output is all on stdout. */
  tty?: boolean | TerminalSize | undefined;
  /** True: exec() returns a Command as soon as the command runs. */
  background?: boolean | undefined;
}

/** One connection to a command's streams. */
interface Attachment {
  readonly opened: Promise<Stream>;
  readonly done: Promise<CommandResult>;
  readonly controller: AbortController;
  stream: Stream | undefined;
  /** Made by a wait, and let go of when the last wait has left. */
  readonly onDemand: boolean;
  waiters: number;
  settled: boolean;
  /** Input in order: the last write under way. */
  writing: Promise<void>;
}

/**
 * A command that runs, or ran, in a sandbox. The daemon keeps it whatever becomes of this handle.
 *
 * @example
 * const command = await sandbox.exec("sleep 5; echo done", { background: true });
 * const result = await command.wait({ signal: AbortSignal.timeout(60_000) });
 */
export class Command {
  /** The command's id. */
  readonly id: string;
  /** The id of its sandbox. */
  readonly sandboxId: string;
  readonly #transport: Transport;
  readonly #output: OutputOptions;
  readonly #limit: number;
  #stdin: boolean | undefined;
  #attachment: Attachment | undefined;
  #result: CommandResult | undefined;

  /** @internal */
  constructor(transport: Transport, sandboxId: string, id: string, output: OutputOptions, stdin: boolean | undefined) {
    this.#transport = transport;
    this.sandboxId = sandboxId;
    this.id = id;
    this.#output = output;
    this.#limit = outputLimit(output);
    this.#stdin = stdin;
  }

  /**
   * Waits until the command ends. On a handle that is not attached it attaches first, and the daemon replays the output
   * that it still holds. An abort rejects with the signal's reason; the command keeps running.
   *
   * @throws ShardConnectionError when the stream breaks; the message says what the daemon knows of the command.
   * @example
   * const { exitCode, stdout } = await command.wait({ signal: AbortSignal.timeout(30_000) });
   */
  async wait(options: CallOptions = {}): Promise<CommandResult> {
    const { signal } = options;
    signal?.throwIfAborted();
    if (this.#result !== undefined) return this.#result;
    const attachment = (this.#attachment ??= this.#attach(true));
    attachment.waiters++;
    try {
      return await abortable(attachment.done, signal);
    } finally {
      attachment.waiters--;
      if (attachment.settled) {
        if (this.#attachment === attachment) this.#attachment = undefined;
      } else if (attachment.onDemand && attachment.waiters === 0) {
        this.#leave(attachment);
      }
    }
  }

  /**
   * Sends a signal, "TERM" or "KILL".
   *
   * @throws ConflictError (exec_exited) when the command has ended.
   * @example
   * await command.kill("KILL");
   */
  async kill(signal: "TERM" | "KILL" = "TERM", options: CallOptions = {}): Promise<void> {
    await this.#transport.json("POST", this.#path("kill"), { json: { signal }, signal: options.signal });
  }

  /**
   * Writes to the command's input and waits while the command does not read it.
   *
   * @throws ShardConnectionError when the stream has ended.
   * @example
   * await command.writeStdin("hello\n");
   */
  async writeStdin(data: string | Uint8Array, options: CallOptions = {}): Promise<void> {
    const bytes = inputBytes(data);
    if (this.#stdin === false) throw new TypeError("the command has no open input: start it with background: true and stdin: true");
    await abortable(this.#write(bytes, false), options.signal);
  }

  /**
   * Ends the command's input. Repeated calls do nothing.
   *
   * @example
   * await command.closeStdin();
   */
  async closeStdin(options: CallOptions = {}): Promise<void> {
    if (this.#stdin === false) return;
    await abortable(this.#write(undefined, true), options.signal);
    this.#stdin = false;
  }

  /**
   * Tells the command's terminal its size.
   *
   * @throws NotFoundError when it has none or has ended.
   * @example
   * await command.resize(50, 200);
   */
  async resize(rows: number, cols: number, options: CallOptions = {}): Promise<void> {
    await this.#transport.json("POST", this.#path("resize"), { json: terminalSize({ rows, cols }), signal: options.signal });
  }

  /**
   * Reads the daemon's record.
   *
   * @example
   * const { state } = await command.inspect();
   */
  async inspect(options: CallOptions = {}): Promise<CommandInfo> {
    const record = await this.#transport.json("GET", this.#path(), { signal: options.signal });
    return toCommandInfo(new Fields(record, "a command"));
  }

  /**
   * Leaves the stream; the command keeps running, and the daemon keeps the newest of its output.
   *
   * @example
   * command.disconnect();
   */
  disconnect(): void {
    if (this.#attachment !== undefined) this.#leave(this.#attachment);
  }

  /**
   * Attaches again, and the daemon replays the output that it still holds. Does nothing while attached.
   *
   * @example
   * await command.reconnect();
   */
  async reconnect(options: CallOptions = {}): Promise<void> {
    const { signal } = options;
    signal?.throwIfAborted();
    if (this.#attachment?.settled === true) this.#attachment = undefined;
    this.#result = undefined;
    const fresh = this.#attachment === undefined;
    const attachment = (this.#attachment ??= this.#attach(false));
    try {
      await abortable(attachment.opened, signal);
    } catch (error) {
      if (fresh) this.#leave(attachment);
      throw error;
    }
  }

  /** @internal Attaches for the first time, and sends input that is known already. */
  async start(stdin: Uint8Array | undefined, signal: AbortSignal | undefined): Promise<void> {
    const attachment = (this.#attachment = this.#attach(false));
    if (stdin !== undefined) {
      this.#write(stdin, true).catch(() => undefined); // a command may end before it has read everything
      this.#stdin = false;
    }
    try {
      await abortable(attachment.opened, signal);
    } catch (error) {
      this.#leave(attachment);
      if (!(error instanceof ShardConnectionError)) throw error;
      throw new ShardConnectionError(`the command ${this.id} was started, but its output cannot be followed: ${error.message}`, { cause: error });
    }
  }

  /** @internal Waits to the end, and lets go of the stream whatever happens. */
  async finish(signal: AbortSignal | undefined): Promise<CommandResult> {
    try {
      return await this.wait({ signal });
    } finally {
      this.disconnect();
    }
  }

  #path(...more: string[]): string {
    return route("sandboxes", this.sandboxId, "exec", this.id, ...more);
  }

  #attach(onDemand: boolean): Attachment {
    const controller = new AbortController();
    const opened = this.#open(controller.signal);
    const done = this.#follow(opened, controller.signal);
    const attachment: Attachment = { opened, done, controller, onDemand, stream: undefined, waiters: 0, settled: false, writing: Promise.resolve() };
    opened.then(
      (stream) => (attachment.stream = stream),
      () => undefined,
    );
    done.then(
      (result) => {
        attachment.settled = true;
        if (this.#attachment === attachment) this.#result = result;
      },
      () => (attachment.settled = true), // the next wait hears of it
    );
    return attachment;
  }

  async #open(signal: AbortSignal): Promise<Stream> {
    const deadline = Date.now() + again.during;
    for (;;) {
      try {
        return await this.#transport.stream(this.#path(), { signal });
      } catch (error) {
        if (!(error instanceof ConflictError) || error.code !== "in_use" || Date.now() >= deadline) throw error;
        await pause(again.every, signal);
      }
    }
  }

  #leave(attachment: Attachment): void {
    if (this.#attachment === attachment) this.#attachment = undefined;
    attachment.controller.abort(new ShardConnectionError(`disconnected from the command ${this.id}, which keeps running`));
    attachment.stream?.close();
  }

  /** Carries the output until the closing message. */
  async #follow(opened: Promise<Stream>, signal: AbortSignal): Promise<CommandResult> {
    const stream = await opened;
    try {
      signal.throwIfAborted();
      const output = new Output(this.#limit);
      for (;;) {
        const message = await this.#next(stream, signal);
        if (message.kind === kind.last) return this.#exit(message, output);
        output.add(message.kind, message.payload);
        const call = message.kind === kind.stdout ? this.#output.onStdout : this.#output.onStderr;
        if (call !== undefined && message.payload.length > 0) await call(message.payload);
      }
    } catch (error) {
      if (signal.aborted) throw signal.reason;
      throw error;
    } finally {
      stream.close();
    }
  }

  #exit(message: Received, output: Output): CommandResult {
    const f = new Fields(message.json(), "how the command ended");
    const error = f.maybeText("error");
    const exitCode = f.number("code");
    if (error !== null && error !== "") throw new CommandNotStartedError(exitCode, error);
    const lostBytes = f.maybeNumber("lost_bytes") ?? 0;
    return {
      id: this.id,
      exitCode,
      signal: f.maybeNumber("signal") || null,
      stdout: output.text(kind.stdout, lostBytes > 0),
      stderr: output.text(kind.stderr, lostBytes > 0),
      lostBytes,
    };
  }

  /** The next message. A stream that ended without its last one says nothing of the command; its record does. */
  async #next(stream: Stream, left: AbortSignal): Promise<Received> {
    const what = `the stream of the command ${this.id}`;
    try {
      const message = await take(stream, what);
      if (message !== undefined) return message;
    } catch (error) {
      if (!(error instanceof ShardConnectionError)) throw error;
    }
    left.throwIfAborted();
    let then: string;
    try {
      const info = await this.inspect({ signal: AbortSignal.timeout(explaining) });
      then =
        info.state === "exited"
          ? `the command has ended with exit code ${info.exitCode}: reconnect() reads the output that is held`
          : "the command is still running: reconnect() attaches to it again";
    } catch (error) {
      if (error instanceof NotFoundError) then = "the server does not know the command any more";
      else then = `what became of the command is unknown: ${(error as Error).message}`;
    }
    throw lost(stream, what, then);
  }

  #write(data: Uint8Array | undefined, end: boolean): Promise<void> {
    const attachment = this.#attachment;
    if (attachment === undefined) return Promise.reject(new Error("the handle is not attached: call reconnect() first"));
    const work = attachment.writing.then(async () => {
      const stream = await attachment.opened;
      const over = new ShardConnectionError(`the command ${this.id} takes no more input: its stream has ended`);
      for (let at = 0; data !== undefined && at < data.length; at += piece) {
        if (!(await stream.send(stdinHead, data.subarray(at, at + piece)))) throw over;
      }
      if (end && !(await stream.send(stdinEnd, nothing))) throw over;
    });
    attachment.writing = work.catch(() => undefined);
    return work;
  }
}

const stdinHead = Uint8Array.of(kind.stdin);
const stdinEnd = Uint8Array.of(kind.stdinClosed);
const nothing = new Uint8Array(0);

function inputBytes(data: string | Uint8Array): Uint8Array {
  if (typeof data === "string") return Buffer.from(data, "utf8");
  if (data instanceof Uint8Array) return data;
  throw new TypeError("input must be a string or a Uint8Array");
}

function outputLimit(options: OutputOptions): number {
  return whole("outputLimitBytes", options.outputLimitBytes ?? defaultOutputLimit, 0);
}

/** Starts a command, and attaches to it. */
export async function startCommand(transport: Transport, sandboxId: string, command: string | readonly string[], options: ExecOptions): Promise<Command> {
  const { stdin, tty, background = false, signal } = options;
  outputLimit(options);
  if (stdin === true && !background) throw new TypeError("stdin: true is for background: true; pass the whole input instead");
  const input = stdin === undefined || typeof stdin === "boolean" ? undefined : inputBytes(stdin);
  const json = {
    command: argv(command),
    env: environment(options.env),
    workdir: options.workdir,
    user: options.user,
    stdin: stdin === true || input !== undefined || undefined,
    tty: tty === undefined || tty === false ? undefined : true,
    size: typeof tty === "object" ? terminalSize(tty) : undefined,
    attach: true,
  };
  const record = new Fields(await transport.json("POST", route("sandboxes", sandboxId, "exec"), { json, signal }), "a command");
  const started = new Command(transport, sandboxId, record.text("exec"), options, stdin === true);
  await started.start(input, signal);
  return started;
}

/** The commands of one sandbox, as `sandbox.commands`. */
export class Commands {
  readonly #transport: Transport;
  readonly #sandbox: () => string;

  /** @internal */
  constructor(transport: Transport, sandbox: () => string) {
    this.#transport = transport;
    this.#sandbox = sandbox;
  }

  /**
   * Lists the commands that the daemon holds: those that run, and the newest 32 that have ended.
   *
   * @example
   * const running = (await sandbox.commands.list()).filter((c) => c.state === "running");
   */
  async list(options: CallOptions = {}): Promise<CommandInfo[]> {
    return (await pages(this.#transport, route("sandboxes", this.#sandbox(), "exec"), "execs", toCommandInfo, { signal: options.signal })).items;
  }

  /**
   * Finds a command again. The handle is not attached; wait() and reconnect() attach it.
   *
   * @throws NotFoundError
   * @example
   * const command = await sandbox.commands.get(id);
   */
  async get(id: string, options: CallOptions & OutputOptions = {}): Promise<Command> {
    outputLimit(options);
    const record = await this.#transport.json("GET", route("sandboxes", this.#sandbox(), "exec", id), { signal: options.signal });
    const info = toCommandInfo(new Fields(record, "a command"));
    return new Command(this.#transport, info.sandbox, info.id, options, undefined);
  }
}
