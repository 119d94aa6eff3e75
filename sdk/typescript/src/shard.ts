/** The client of one server, and what lives beside its sandboxes. */

import { asyncDispose } from "./dispose.js";
import { environment, pages, portForward, reference, whole } from "./inputs.js";
import {
  toCapabilities,
  toPolicy,
  toPort,
  toProviderInfo,
  toSandboxInfo,
  toSecretInfo,
  toSnapshot,
  toVersion,
  type Capabilities,
  type Policy,
  type PolicyRule,
  type Port,
  type PortForward,
  type ProviderInfo,
  type SandboxInfo,
  type SecretInfo,
  type Snapshot,
  type Version,
} from "./models.js";
import { Fields } from "./records.js";
import { Sandbox } from "./sandbox.js";
import { resolve, type ShardOptions } from "./settings.js";
import { Transport, route } from "./transport.js";
import type { CallOptions } from "./waiting.js";

/** What a new sandbox is like. Give an image or a snapshot, not both. */
export interface CreateOptions extends CallOptions {
  /** The image, such as "alpine:3.20". */
  image?: string | undefined;
  /** The id or name of a snapshot to start from. */
  snapshot?: string | undefined;
  /** A name to use in place of the id. */
  name?: string | undefined;
  /** How it is isolated, such as "gvisor" or "runc": the name of one of providers(). Default: a snapshot's own, or the daemon's. */
  provider?: string | undefined;
  /** The environment that every command in the sandbox starts with. */
  env?: Readonly<Record<string, string>> | undefined;
  /** The default directory of commands. */
  workdir?: string | undefined;
  /** The default user of commands: a name or uid, such as "nobody" or "1000". */
  user?: string | undefined;
  /** The names of the stored secrets that the sandbox may use. */
  secrets?: readonly string[] | undefined;
  /** The name of the network policy. Default: the internet but no private network. */
  policy?: string | undefined;
  /** The memory limit in MiB. Default: a snapshot's own; else 512 on Firecracker and vz, and none elsewhere. */
  memoryMiB?: number | undefined;
  /** The number of CPUs. Default: the daemon's. */
  vcpus?: number | undefined;
  /** The disk limit in MiB. Default: a snapshot's own, or the daemon's. */
  diskMiB?: number | undefined;
  /** A swap file inside the disk limit, in MiB. Default: 2048 on Firecracker and vz; others refuse any but 0. */
  swapMiB?: number | undefined;
  /** Host ports to forward from the first start. */
  ports?: readonly PortForward[] | undefined;
}

/** Sandboxes, which it iterates over, and a warning for each entry that the daemon could not read. */
export class SandboxList implements Iterable<Sandbox> {
  /** Those that could be read. */
  readonly sandboxes: Sandbox[];
  /** One for each entry that could not be read; without any the list is complete. */
  readonly warnings: string[];

  /** @internal */
  constructor(sandboxes: Sandbox[], warnings: string[]) {
    this.sandboxes = sandboxes;
    this.warnings = warnings;
  }

  [Symbol.iterator](): Iterator<Sandbox> {
    return this.sandboxes[Symbol.iterator]();
  }
}

/**
 * A client of `shard serve`. Without options it reads SHARD_REMOTE, SHARD_API_KEY and SHARD_CA_FILE.
 *
 * Every call takes an AbortSignal. A plain call fails with a ShardConnectionError when the server makes no progress for
 * 60 seconds; a call that waits on a sandbox has no such bound, but notices within 30 seconds that the server is dead.
 *
 * @throws ConfigurationError when a setting is missing or refused.
 * @example
 * const shard = new Shard();
 * try {
 *   const sandbox = await shard.create({ image: "alpine:3.20" });
 * } finally {
 *   shard.close();
 * }
 */
export class Shard implements AsyncDisposable {
  /** Network policies. */
  readonly policies: Policies;
  /** Stored secrets. */
  readonly secrets: Secrets;
  /** Snapshots of sandboxes' files. */
  readonly snapshots: Snapshots;
  readonly #transport: Transport;

  constructor(options: ShardOptions = {}) {
    this.#transport = new Transport(resolve(options));
    this.policies = new Policies(this.#transport);
    this.secrets = new Secrets(this.#transport);
    this.snapshots = new Snapshots(this.#transport);
  }

  /**
   * Lets go of every connection. What is under way fails; commands keep running. Repeated calls do nothing.
   *
   * @example
   * shard.close();
   */
  close(): void {
    this.#transport.close();
  }

  /** The same as close(). */
  async [asyncDispose](): Promise<void> {
    this.close();
  }

  /**
   * Makes a sandbox and waits until it runs, which can take minutes while the server pulls the image. The sandbox comes
   * back in state "running", or in state "failed" with the reason in info.failedReason.
   *
   * @example
   * const web = await shard.create({ image: "python:3.12", name: "web", memoryMiB: 512 });
   */
  async create(options: CreateOptions = {}): Promise<Sandbox> {
    const { image, snapshot, signal } = options;
    if ((image === undefined) === (snapshot === undefined)) throw new TypeError("create() needs an image or a snapshot, and not both");
    const bound = (name: string, value: number | undefined): number | undefined => (value === undefined ? undefined : whole(name, value, 0));
    const json = {
      image,
      snapshot,
      name: options.name,
      provider: options.provider,
      env: environment(options.env),
      workdir: options.workdir,
      user: options.user,
      secrets: options.secrets?.length ? options.secrets : undefined,
      policy: options.policy,
      ports: options.ports?.length ? options.ports.map(portForward) : undefined,
      resources: {
        memory_mib: bound("memoryMiB", options.memoryMiB),
        vcpus: bound("vcpus", options.vcpus) ?? 0,
        disk_mib: bound("diskMiB", options.diskMiB) ?? 0,
        swap_mib: bound("swapMiB", options.swapMiB),
      },
    };
    return this.#sandbox(await this.#transport.json("POST", route("sandboxes"), { query: { wait: true }, json, waits: true, signal }));
  }

  /**
   * Finds a sandbox by id, by four or more characters with which only its id begins, or by name.
   *
   * @throws NotFoundError
   * @example
   * const sandbox = await shard.get("demo");
   */
  async get(ref: string, options: CallOptions = {}): Promise<Sandbox> {
    return this.#sandbox(await this.#transport.json("GET", route("sandboxes", ref), { signal: options.signal }));
  }

  /**
   * Lists active sandboxes, with `all` the stopped ones too. The warnings name entries that the daemon could not read:
   * check them before you treat the list as complete.
   *
   * @example
   * for (const sandbox of await shard.list({ all: true })) console.log(sandbox.id);
   */
  async list(options: CallOptions & { all?: boolean | undefined } = {}): Promise<SandboxList> {
    const { all, signal } = options;
    const { items, warnings } = await pages(this.#transport, route("sandboxes"), "sandboxes", toSandboxInfo, { query: { all: all || undefined }, signal });
    return new SandboxList(items.map((info) => new Sandbox(this.#transport, info)), warnings);
  }

  /**
   * The server's version and the version of its API.
   *
   * @example
   * const { apiVersion } = await shard.version();
   */
  async version(options: CallOptions = {}): Promise<Version> {
    return toVersion(new Fields(await this.#transport.json("GET", route("version"), { signal: options.signal }), "a version"));
  }

  /**
   * Which verbs the server's default provider supports.
   *
   * @example
   * if ((await shard.capabilities()).pause) await sandbox.pause();
   */
  async capabilities(options: CallOptions = {}): Promise<Capabilities> {
    return toCapabilities(new Fields(await this.#transport.json("GET", route("capabilities"), { signal: options.signal }), "capabilities"));
  }

  /**
   * Every provider that the server knows, also those that do not work on its host, with the reason.
   *
   * @example
   * const usable = (await shard.providers()).filter((p) => p.available);
   */
  async providers(options: CallOptions = {}): Promise<ProviderInfo[]> {
    const record = await this.#transport.json("GET", route("providers"), { signal: options.signal });
    return new Fields(record, "a list").objects("providers", toProviderInfo, "a provider");
  }

  /**
   * The port forwards of every sandbox.
   *
   * @example
   * const all = await shard.ports();
   */
  async ports(options: CallOptions = {}): Promise<Port[]> {
    return (await pages(this.#transport, route("ports"), "ports", toPort, { signal: options.signal })).items;
  }

  #sandbox(record: unknown): Sandbox {
    return new Sandbox(this.#transport, toSandboxInfo(new Fields(record, "a sandbox")));
  }
}

/** Network policies, as `shard.policies`. */
export class Policies {
  readonly #transport: Transport;

  /** @internal */
  constructor(transport: Transport) {
    this.#transport = transport;
  }

  /**
   * Makes a policy, or replaces all its rules. Sandboxes that hold it follow the new rules at once.
   *
   * @example
   * await shard.policies.set("offline", [{ action: "deny", rule: "any" }]);
   */
  async set(name: string, rules: readonly PolicyRule[], options: CallOptions = {}): Promise<Policy> {
    const json = { rules: rules.map(({ action, rule }) => ({ action, rule })) };
    return policy(await this.#transport.json("PUT", route("policies", name), { json, signal: options.signal }));
  }

  /**
   * Reads a policy.
   *
   * @example
   * const { holders } = await shard.policies.get("api-only");
   */
  async get(name: string, options: CallOptions = {}): Promise<Policy> {
    return policy(await this.#transport.json("GET", route("policies", name), { signal: options.signal }));
  }

  /**
   * Lists the policies; their holders and dns are left empty.
   *
   * @example
   * const names = (await shard.policies.list()).map((p) => p.name);
   */
  async list(options: CallOptions = {}): Promise<Policy[]> {
    return (await pages(this.#transport, route("policies"), "policies", toPolicy, { signal: options.signal })).items;
  }

  /**
   * Deletes a policy that no sandbox holds.
   *
   * @throws ConflictError (in_use) with the holders
   * @example
   * await shard.policies.remove("api-only");
   */
  async remove(name: string, options: CallOptions = {}): Promise<void> {
    await this.#transport.json("DELETE", route("policies", name), { signal: options.signal });
  }

  /**
   * Gives a stopped sandbox a policy.
   *
   * @example
   * await shard.policies.attach(sandbox, "api-only");
   */
  async attach(sandbox: string | Sandbox, name: string, options: CallOptions = {}): Promise<SandboxInfo> {
    const path = route("sandboxes", reference(sandbox), "policy");
    return sandboxInfo(await this.#transport.json("PUT", path, { json: { policy: name }, signal: options.signal }));
  }

  /**
   * Takes a stopped sandbox's policy away.
   *
   * @example
   * await shard.policies.detach(sandbox);
   */
  async detach(sandbox: string | Sandbox, options: CallOptions = {}): Promise<SandboxInfo> {
    return sandboxInfo(await this.#transport.json("DELETE", route("sandboxes", reference(sandbox), "policy"), { signal: options.signal }));
  }
}

/** What a secret is set to. */
export interface SecretOptions extends CallOptions {
  /** The value. It is sent, and never read back or shown. */
  value: string;
  /** The hosts that may get it, such as "api.example.com" or "*.example.com". Needed the first time; kept when left out later. */
  destinations?: readonly string[] | undefined;
  /** What stands for the value in the sandbox. Default: "mock-" and the name. */
  placeholder?: string | undefined;
}

/** The stored secrets, which it iterates over, and a warning for each entry that the daemon could not read. */
export class SecretList implements Iterable<SecretInfo> {
  /** Those that could be read. */
  readonly secrets: SecretInfo[];
  /** One for each entry that could not be read; without any the list is complete. */
  readonly warnings: string[];

  /** @internal */
  constructor(secrets: SecretInfo[], warnings: string[]) {
    this.secrets = secrets;
    this.warnings = warnings;
  }

  [Symbol.iterator](): Iterator<SecretInfo> {
    return this.secrets[Symbol.iterator]();
  }
}

/** Stored secrets, as `shard.secrets`. */
export class Secrets {
  readonly #transport: Transport;

  /** @internal */
  constructor(transport: Transport) {
    this.#transport = transport;
  }

  /**
   * Stores a secret, or replaces its value.
   *
   * @example
   * await shard.secrets.set("API_TOKEN", { value: token, destinations: ["api.example.com"] });
   */
  async set(name: string, options: SecretOptions): Promise<SecretInfo> {
    const { value, destinations, placeholder, signal } = options;
    if (typeof value !== "string") throw new TypeError("the value of a secret must be a string");
    const json = { value, destinations, placeholder };
    return toSecretInfo(new Fields(await this.#transport.json("PUT", route("secrets", name), { json, signal }), "a secret"));
  }

  /**
   * Lists the secrets, and a warning for each entry that the daemon could not read.
   *
   * @example
   * for (const { name, destinations } of await shard.secrets.list()) console.log(name, destinations);
   */
  async list(options: CallOptions = {}): Promise<SecretList> {
    const { items, warnings } = await pages(this.#transport, route("secrets"), "secrets", toSecretInfo, { signal: options.signal });
    return new SecretList(items, warnings);
  }

  /**
   * Deletes a secret that no sandbox holds; with `force` also one that is held, whose placeholder then gets no value.
   *
   * @example
   * await shard.secrets.remove("API_TOKEN");
   */
  async remove(name: string, options: CallOptions & { force?: boolean | undefined } = {}): Promise<void> {
    await this.#transport.json("DELETE", route("secrets", name), { query: { force: options.force || undefined }, signal: options.signal });
  }

  /**
   * Grants a secret to a stopped sandbox.
   *
   * @example
   * await shard.secrets.grant(sandbox, "API_TOKEN");
   */
  async grant(sandbox: string | Sandbox, name: string, options: CallOptions = {}): Promise<SandboxInfo> {
    const path = route("sandboxes", reference(sandbox), "secrets", name);
    return sandboxInfo(await this.#transport.json("POST", path, { signal: options.signal }));
  }

  /**
   * Takes a secret away from a stopped sandbox.
   *
   * @example
   * await shard.secrets.ungrant("demo", "API_TOKEN");
   */
  async ungrant(sandbox: string | Sandbox, name: string, options: CallOptions = {}): Promise<SandboxInfo> {
    const path = route("sandboxes", reference(sandbox), "secrets", name);
    return sandboxInfo(await this.#transport.json("DELETE", path, { signal: options.signal }));
  }
}

/** Snapshots, as `shard.snapshots`. */
export class Snapshots {
  readonly #transport: Transport;

  /** @internal */
  constructor(transport: Transport) {
    this.#transport = transport;
  }

  /**
   * Copies the files of a stopped sandbox into a snapshot, which outlives the sandbox.
   *
   * @example
   * const { id } = await shard.snapshots.create(sandbox, { name: "demo-files" });
   */
  async create(sandbox: string | Sandbox, options: CallOptions & { name?: string | undefined } = {}): Promise<Snapshot> {
    const json = { sandbox: reference(sandbox), name: options.name };
    return snapshot(await this.#transport.json("POST", route("snapshots"), { json, waits: true, signal: options.signal }));
  }

  /**
   * Lists the snapshots.
   *
   * @example
   * const names = (await shard.snapshots.list()).map((s) => s.name);
   */
  async list(options: CallOptions = {}): Promise<Snapshot[]> {
    return (await pages(this.#transport, route("snapshots"), "snapshots", toSnapshot, { signal: options.signal })).items;
  }

  /**
   * Reads a snapshot's record, by id or name.
   *
   * @example
   * const { size } = await shard.snapshots.inspect("demo-files");
   */
  async inspect(ref: string, options: CallOptions = {}): Promise<Snapshot> {
    return snapshot(await this.#transport.json("GET", route("snapshots", ref), { signal: options.signal }));
  }

  /**
   * Deletes a snapshot.
   *
   * @example
   * await shard.snapshots.remove("demo-files");
   */
  async remove(ref: string, options: CallOptions = {}): Promise<void> {
    await this.#transport.json("DELETE", route("snapshots", ref), { signal: options.signal });
  }
}

const policy = (record: unknown): Policy => toPolicy(new Fields(record, "a policy"));
const sandboxInfo = (record: unknown): SandboxInfo => toSandboxInfo(new Fields(record, "a sandbox"));
const snapshot = (record: unknown): Snapshot => toSnapshot(new Fields(record, "a snapshot"));
