/** The handle of one sandbox. */

import { Command, Commands, startCommand, type ExecOptions } from "./command.js";
import { asyncDispose } from "./dispose.js";
import { NotFoundError } from "./errors.js";
import { Files } from "./files.js";
import { Follow, records } from "./follow.js";
import { pages, whole } from "./inputs.js";
import { toEgressDecision, toPort, toSandboxInfo, type CommandResult, type EgressDecision, type Port, type SandboxInfo } from "./models.js";
import { Processes, runProcess, type Process, type RunOptions } from "./process.js";
import { Fields } from "./records.js";
import type { Stream } from "./stream.js";
import { route, type Transport } from "./transport.js";
import type { CallOptions } from "./waiting.js";

/**
 * A sandbox. `info` holds the record that the last call on this handle returned; `id` and `name` read from it.
 *
 * `await using` removes the sandbox at the end of its block, running or not.
 *
 * @example
 * await using sandbox = await shard.create({ image: "python:3.12-slim", memoryMiB: 512 });
 * console.log((await sandbox.exec(["python", "-c", "print(6 * 7)"])).stdout);
 */
export class Sandbox implements AsyncDisposable {
  /** The commands that the daemon holds for this sandbox. */
  readonly commands: Commands;
  /** Its named processes. */
  readonly processes: Processes;
  /** Its files. */
  readonly files: Files;
  /** Its port forwards. */
  readonly ports: Ports;
  readonly #transport: Transport;
  #info: SandboxInfo;

  /** @internal */
  constructor(transport: Transport, info: SandboxInfo) {
    this.#transport = transport;
    this.#info = info;
    const id = (): string => this.#info.id;
    this.commands = new Commands(transport, id);
    this.processes = new Processes(transport, id);
    this.files = new Files(transport, id);
    this.ports = new Ports(transport, id);
  }

  /** Its generated id. */
  get id(): string {
    return this.#info.id;
  }

  /** Null when it has none. */
  get name(): string | null {
    return this.#info.name;
  }

  /** The record as it was last read. */
  get info(): SandboxInfo {
    return this.#info;
  }

  /**
   * Reads the sandbox's record again.
   *
   * @example
   * const { state } = await sandbox.inspect();
   */
  async inspect(options: CallOptions = {}): Promise<SandboxInfo> {
    return this.#took(await this.#transport.json("GET", this.#path(), { signal: options.signal }));
  }

  /**
   * Stops the sandbox and keeps its files. Each process has up to 30 seconds to exit.
   *
   * @example
   * await sandbox.stop();
   */
  async stop(options: CallOptions = {}): Promise<void> {
    await this.#verb("stop", options);
  }

  /**
   * Starts a stopped sandbox with its files.
   *
   * @example
   * await sandbox.start();
   */
  async start(options: CallOptions = {}): Promise<void> {
    await this.#verb("start", options);
  }

  /**
   * Saves memory and files and suspends the sandbox. Named processes go on at resume(); commands that run end, with a
   * ConflictError for who waits for them, and connections to forwarded ports are closed.
   *
   * @throws UnsupportedError when the provider cannot, or not what a program in the sandbox holds; it runs on.
   * @example
   * await sandbox.pause();
   */
  async pause(options: CallOptions = {}): Promise<void> {
    await this.#verb("pause", options);
  }

  /**
   * Continues a paused sandbox from where it paused. When that fails it stays paused.
   *
   * @throws UnsupportedError when the provider cannot, or is no longer the version that paused it.
   * @example
   * await sandbox.resume();
   */
  async resume(options: CallOptions = {}): Promise<void> {
    await this.#verb("resume", options);
  }

  /**
   * Makes a running sandbox from this one's memory and files.
   *
   * @throws UnsupportedError when the provider cannot.
   * @example
   * const copy = await sandbox.fork({ name: "demo-copy" });
   */
  async fork(options: CallOptions & { name?: string | undefined } = {}): Promise<Sandbox> {
    const { name, signal } = options;
    const record = await this.#transport.json("POST", this.#path("fork"), { json: { name }, waits: true, signal });
    return new Sandbox(this.#transport, toSandboxInfo(new Fields(record, "a sandbox")));
  }

  /**
   * Removes the sandbox and its files. With `force`, a running or paused one is stopped first.
   *
   * @example
   * await sandbox.remove({ force: true });
   */
  async remove(options: CallOptions & { force?: boolean | undefined } = {}): Promise<void> {
    const query = { force: options.force || undefined };
    await this.#transport.json("DELETE", this.#path(), { query, waits: true, signal: options.signal });
  }

  /**
   * Runs a command: a string under /bin/sh -c, a list as it is, with no shell. Returns how it ended; a non-zero exit code
   * is a result, not an error. With `background: true` it returns a Command as soon as the command runs. Leaving early,
   * by whatever way, never ends the command.
   *
   * @throws CommandNotStartedError when it never ran, for example because its program does not exist.
   * @example
   * const result = await sandbox.exec("echo $GREETING", { env: { GREETING: "hello" } });
   */
  async exec(command: string | readonly string[], options: ExecOptions & { background: true }): Promise<Command>;
  async exec(command: string | readonly string[], options?: ExecOptions & { background?: false | undefined }): Promise<CommandResult>;
  async exec(command: string | readonly string[], options?: ExecOptions): Promise<CommandResult | Command>;
  async exec(command: string | readonly string[], options: ExecOptions = {}): Promise<CommandResult | Command> {
    const started = await startCommand(this.#transport, this.id, command, options);
    return options.background === true ? started : started.finish(options.signal);
  }

  /**
   * Starts a named process under the sandbox's supervisor.
   *
   * @throws CommandNotStartedError, ConflictError (name_taken)
   * @example
   * const ticker = await sandbox.run("while sleep 1; do echo tick; done", { name: "ticker" });
   */
  async run(command: string | readonly string[], options: RunOptions = {}): Promise<Process> {
    return runProcess(this.#transport, this.id, command, options);
  }

  /**
   * The newest network decisions that the daemon holds for this sandbox, at most 10,000, the oldest first.
   *
   * @example
   * const denied = (await sandbox.egressLog()).filter((d) => d.verdict === "deny");
   */
  async egressLog(options: CallOptions = {}): Promise<EgressDecision[]> {
    const list = await this.#transport.json("GET", this.#path("egress-log"), { signal: options.signal });
    return new Fields({ list }, "an answer").objects("list", toEgressDecision, "a decision");
  }

  /**
   * Yields the newest network decisions that the daemon holds, then each new one, until the sandbox ends or is paused.
   *
   * @example
   * for await (const { verdict, host } of sandbox.followEgressLog()) console.log(verdict, host);
   */
  followEgressLog(options: CallOptions = {}): Follow<EgressDecision> {
    const open = (signal: AbortSignal): Promise<Stream> => this.#transport.stream(this.#path("egress-log"), { query: { follow: true }, signal });
    return new Follow(open, records(toEgressDecision, "the egress log's stream"), options.signal);
  }

  /** Removes the sandbox unless that has happened already. */
  async [asyncDispose](): Promise<void> {
    try {
      await this.remove({ force: true });
    } catch (error) {
      if (!(error instanceof NotFoundError)) throw error;
    }
  }

  async #verb(verb: string, options: CallOptions): Promise<void> {
    this.#took(await this.#transport.json("POST", this.#path(verb), { waits: true, signal: options.signal }));
  }

  #took(record: unknown): SandboxInfo {
    this.#info = toSandboxInfo(new Fields(record, "a sandbox"));
    return this.#info;
  }

  #path(...more: string[]): string {
    return route("sandboxes", this.id, ...more);
  }
}

/** The port forwards of one sandbox, as `sandbox.ports`. */
export class Ports {
  readonly #transport: Transport;
  readonly #sandbox: () => string;

  /** @internal */
  constructor(transport: Transport, sandbox: () => string) {
    this.#transport = transport;
    this.#sandbox = sandbox;
  }

  /**
   * Forwards a host port to a port on the sandbox's 127.0.0.1, or changes the forward it has. The host listens on
   * 127.0.0.1, or with `public` on 0.0.0.0.
   *
   * @throws ConflictError (in_use)
   * @example
   * const { reachableOn } = await sandbox.ports.add(9000, 8000);
   */
  async add(hostPort: number, guestPort: number, options: CallOptions & { public?: boolean | undefined } = {}): Promise<Port> {
    const json = { guest_port: whole("guestPort", guestPort, 1, 65535), public: options.public ?? false };
    const record = await this.#transport.json("PUT", this.#path(hostPort), { json, signal: options.signal });
    return toPort(new Fields(record, "a port"));
  }

  /**
   * Lists the forwards in the order of their host ports.
   *
   * @example
   * const hostPorts = (await sandbox.ports.list()).map((p) => p.hostPort);
   */
  async list(options: CallOptions = {}): Promise<Port[]> {
    return (await pages(this.#transport, route("sandboxes", this.#sandbox(), "ports"), "ports", toPort, { signal: options.signal })).items;
  }

  /**
   * Ends a forward and the connections that it carries.
   *
   * @example
   * await sandbox.ports.remove(9000);
   */
  async remove(hostPort: number, options: CallOptions = {}): Promise<void> {
    await this.#transport.json("DELETE", this.#path(hostPort), { signal: options.signal });
  }

  #path(hostPort: number): string {
    return route("sandboxes", this.#sandbox(), "ports", String(whole("hostPort", hostPort, 1, 65535)));
  }
}
