/** The values that the SDK takes and returns. What a server may leave out is null; lists are empty instead. */

import { Fields } from "./records.js";

/** A host port that is forwarded to a port on the sandbox's 127.0.0.1. Ports are 1 to 65535. */
export interface PortForward {
  /** The port on the host. */
  hostPort: number;
  /** The port in the sandbox. */
  guestPort: number;
  /** Whether the host listens on 0.0.0.0; else on 127.0.0.1 only. Default false. */
  public?: boolean | undefined;
}

/** The size of a terminal in character cells, each 0 to 65535. */
export interface TerminalSize {
  /** Its height. */
  rows: number;
  /** Its width. */
  cols: number;
}

/** When the supervisor starts a process again. */
export interface Restart {
  /** "no", "on-failure", "always" or "unless-stopped". */
  policy: "no" | "on-failure" | "always" | "unless-stopped" | (string & {});
  /** With "on-failure": how many times in a row; 0, the default, is without a cap. */
  retries?: number | undefined;
  /** The first wait in seconds, up to 60; 0, the default, is 1 s. Each further wait doubles, up to 60 s. */
  backoff?: number | undefined;
}

/** One rule of a network policy; the first that matches decides, and what none matches is denied. */
export interface PolicyRule {
  /** What becomes of what matches. */
  action: "allow" | "deny" | (string & {});
  /** `DEST [tcp|udp[:PORTS]]`, such as "api.example.com", "suffix:example.com tcp:443" or "any". */
  rule: string;
}

/** How a process ended: its exit code, and the number of the signal that ended it or 0. */
export interface ExitStatus {
  /** The exit code; 0 when a signal ended it. */
  code: number;
  /** The signal's number, else 0. */
  signal: number;
}

/** How a command ended and the newest of its output. */
export interface CommandResult {
  /** The command's id. */
  id: string;
  /** Its exit code; 128 plus the number for a death by signal. */
  exitCode: number;
  /** Always null: a signal shows in the exit code. */
  signal: number | null;
  /** The newest output as text; what is not UTF-8 shows as U+FFFD. */
  stdout: string;
  /** The same of its other stream; nothing with a terminal. */
  stderr: string;
  /** Output in bytes that the daemon dropped before any client read it. */
  lostBytes: number;
}

/** The daemon's record of a command. */
export interface CommandInfo {
  /** The command's id, with which commands.get() finds it. */
  id: string;
  /** The id of its sandbox. */
  sandbox: string;
  /** The program and its arguments. */
  command: string[];
  /** Whether it still runs. */
  state: "running" | "exited" | (string & {});
  /** Null while it runs. */
  exitCode: number | null;
  /** Always null: a signal shows in the exit code. */
  signal: number | null;
  /** When it started. */
  startedAt: Date;
  /** Null while it runs. */
  exitedAt: Date | null;
  /** Output in bytes that the daemon dropped before any client read it. */
  lostBytes: number;
}

/** Where a process stands. */
export interface ProcessStatus {
  /** What it does now. */
  state: "running" | "restarting" | "exited" | "killed" | "gave-up" | "stopped" | (string & {});
  /** How often it was started again since it was run or the sandbox started. */
  restarts: number;
  /** How it last ended, null before. */
  exit: ExitStatus | null;
  /** When it last started, null before. */
  startedAt: Date | null;
}

/** The record of a named process. */
export interface ProcessInfo {
  /** Its name in the sandbox. */
  name: string;
  /** The program and its arguments. */
  command: string[];
  /** When it is started again: `backoff` in seconds. */
  restart: { policy: string; retries: number; backoff: number };
  /** Whether kill() ended it. */
  killed: boolean;
  /** Where it stands. */
  status: ProcessStatus;
  /** Variables of its own, as "NAME=value". */
  env: string[];
  /** Its own, null for the sandbox's. */
  workdir: string | null;
  /** Its own, null for the sandbox's. */
  user: string | null;
}

/** The bounds of a sandbox: MiB of memory, disk and swap, and CPUs. 0 is no bound; a disk always has one. */
export interface Resources {
  /** Memory in MiB. */
  memoryMiB: number;
  /** CPUs. */
  vcpus: number;
  /** The writable disk in MiB. */
  diskMiB: number;
  /** Swap in MiB. */
  swapMiB: number;
}

/** That the host ended the sandbox for want of memory. */
export interface OOMInfo {
  /** How often, at least 1. */
  kills: number;
  /** When it last did. */
  killedAt: Date;
  /** When the daemon starts the sandbox again, null when no start is due. */
  restartAt: Date | null;
}

/** A rule of the egress policy as the host enforces it. */
export interface EffectiveRule {
  /** Its position, from "1"; a decision names it. */
  id: string;
  /** "allow" or "deny". */
  action: string;
  /** What it matches, in the form of a PolicyRule. */
  rule: string;
  /** "dns" or "dns-rule" when nobody wrote it, else null. */
  implied: string | null;
}

/** What the host enforces on a sandbox's traffic; `missing` says that the policy is lost and nothing is reachable. */
export interface Egress {
  /** In the order in which they are tried. */
  rules: EffectiveRule[];
  /** Whether the policy is lost. */
  missing: boolean;
}

/** The record of a sandbox. */
export interface SandboxInfo {
  /** Its generated id. */
  id: string;
  /** The image it was made from. */
  image: string;
  /** What isolates it, such as "gvisor". */
  provider: string;
  /** What it does now. */
  state: "pending" | "created" | "running" | "paused" | "unresponsive" | "stopped" | "failed" | (string & {});
  /** Its bounds. */
  resources: Resources;
  /** When it was made. */
  createdAt: Date;
  /** Its name, null when it has none. */
  name: string | null;
  /** The digest of the image, null until it is pulled. */
  digest: string | null;
  /** The id of the snapshot it was made from, else null. */
  snapshot: string | null;
  /** The id of the sandbox it is a fork of, else null. */
  forkedFrom: string | null;
  /** The guest kernel of a virtual machine, else null. */
  kernel: string | null;
  /** Why it is in that state, null in others. */
  stoppedReason: string | null;
  /** Why it failed, null in other states. */
  failedReason: string | null;
  /** Set when the host ended it for want of memory. */
  oom: OOMInfo | null;
  /** Its named processes, in the order of their first runs. */
  processes: ProcessInfo[];
  /** The names of the secrets that it holds. */
  secrets: string[];
  /** The name of its network policy, null when it has none. */
  policy: string | null;
  /** The host ports that are forwarded to it. */
  ports: Required<{ [K in keyof PortForward]: NonNullable<PortForward[K]> }>[];
  /** The last start, null before the first. */
  startedAt: Date | null;
  /** The rules in force; only inspect() and get() read them, and only a sandbox with a policy has them. */
  egress: Egress | null;
}

/** The server's version and the version of its API. */
export interface Version {
  /** The server's. */
  version: string;
  /** The API's, "v0". */
  apiVersion: string;
}

/** Which verbs the server's default provider supports; `swap` says whether swapMiB above 0 is allowed. */
export interface Capabilities {
  /** create(). */
  create: boolean;
  /** start(). */
  start: boolean;
  /** stop(). */
  stop: boolean;
  /** remove(). */
  remove: boolean;
  /** pause(). */
  pause: boolean;
  /** resume(). */
  resume: boolean;
  /** fork(). */
  fork: boolean;
  /** snapshots.create(). */
  snapshot: boolean;
  /** Forwards of ports. */
  port: boolean;
  /** A swapMiB above 0. */
  swap: boolean;
}

/** One way to isolate sandboxes, and what it is worth on the server's host. */
export interface ProviderInfo {
  /** "gvisor", "runc" or another: what create() takes as `provider`. */
  name: string;
  /** Whether it works on that host; if not, `reason` says why. */
  available: boolean;
  /** Why it does not work, else null. */
  reason: string | null;
  /** Whether create() takes it when no provider is named. */
  default: boolean;
  /** The version of its runtime, null when unknown. */
  version: string | null;
  /** Which verbs it has. */
  capabilities: Capabilities;
}

/** An address of the host at which a forward is reached, and the interface that has it. */
export interface HostAddress {
  /** The network interface's name. */
  interface: string;
  /** The IP address. */
  address: string;
}

/** A forward as it stands. */
export interface Port {
  /** The sandbox's id. */
  sandbox: string;
  /** The sandbox's name, null when it has none. */
  sandboxName: string | null;
  /** The port on the host. */
  hostPort: number;
  /** The port in the sandbox. */
  guestPort: number;
  /** Whether the host listens on 0.0.0.0. */
  public: boolean;
  /** Where the host listens: "127.0.0.1" or "0.0.0.0". */
  address: string;
  /** False while the sandbox does not run or the host refuses the port. */
  listening: boolean;
  /** Why the host refuses it, else null. */
  error: string | null;
  /** The addresses a client connects to. */
  reachableOn: HostAddress[];
}

/** What a path is; of a link, the link itself. */
export interface FileInfo {
  /** What it is. */
  type: "file" | "dir" | "symlink" | "other" | (string & {});
  /** In bytes; devices and /proc files report 0 or less than they give. */
  size: number;
  /** Permission bits with setuid, setgid and sticky, up to 0o7777. */
  mode: number;
  /** Who owns it. */
  uid: number;
  /** Which group owns it. */
  gid: number;
  /** The last change of its contents. */
  mtime: Date;
}

/** One entry of a directory. */
export interface FileEntry extends FileInfo {
  /** Its name in the directory. */
  name: string;
}

/** The record of a snapshot: the files of a sandbox, which outlive it. */
export interface Snapshot {
  /** Its generated id. */
  id: string;
  /** Its name, null when it has none. */
  name: string | null;
  /** The id and the name of the sandbox that it was made from. */
  source: string;
  /** The name of the sandbox that it was made from, null when it had none. */
  sourceName: string | null;
  /** The source's image. */
  image: string;
  /** The digest of the source's image. */
  digest: string;
  /** The source's provider. */
  provider: string;
  /** The source's bounds, in MiB. */
  diskMiB: number;
  /** The source's memory in MiB. */
  memoryMiB: number;
  /** What it occupies on the host, in bytes. */
  size: number;
  /** When it was made. */
  createdAt: Date;
}

/** A stored secret without its value, which is never read back. */
export interface SecretInfo {
  /** Its name, and that of the variable that holds the placeholder. */
  name: string;
  /** The hosts that get the value. */
  destinations: string[];
  /** What sandboxes see instead. */
  placeholder: string;
  /** When its value was last set. */
  updatedAt: Date;
}

/** A network policy. */
export interface Policy {
  /** Its name. */
  name: string;
  /** The first that matches decides; what none matches is denied. */
  rules: PolicyRule[];
  /** The sandboxes that hold it. Empty in policies.list(). */
  holders: string[];
  /** "open" or "closed": whether it lets names be looked up. "" in policies.list(). */
  dns: string;
}

/** One change below a directory that is watched. Names that are not UTF-8 show U+FFFD. */
export interface FileEvent {
  /** "overflow": events are missing here, so list the tree again. */
  type: "created" | "modified" | "deleted" | "moved" | "overflow" | (string & {});
  /** What changed, beginning with the path that is watched; of "overflow" that path itself. */
  path: string;
  /** Where a moved entry was, else null. What a moved directory holds moves along without events. */
  movedFrom: string | null;
  /** Whether it is a directory. */
  isDir: boolean;
  /** The sandbox's clock. */
  time: Date;
}

/** One decision about a sandbox's traffic. Headers, bodies and secret values are never part of it. */
export interface EgressDecision {
  /** When it was made. */
  time: Date;
  /** Who made it. */
  source: "proxy" | "dns" | "host" | (string & {});
  /** How it went. */
  verdict: "allow" | "deny" | (string & {});
  /** The id of the rule that decided, or a word such as "default" or "private". */
  rule: string;
  /** The name that was asked for, null for bare addresses. */
  host: string | null;
  /** The port, null for lookups. */
  port: number | null;
  /** The address, null where none was reached. */
  address: string | null;
  /** That of a packet, such as "tcp", null for lookups and requests. */
  protocol: string | null;
  /** The rule as it is written, null where a word decided. */
  ruleText: string | null;
  /** More about it, else null. */
  reason: string | null;
}

/** A rule of the wire in the form in which it is written. */
function ruleText(f: Fields): string {
  const destination = f.object("destination", (d) => ({ kind: d.text("kind"), value: d.text("value") }), "a destination");
  const protocol = f.maybeText("protocol");
  const ports = f.texts("ports");
  const name = destination.kind === "domain-suffix" ? `suffix:${destination.value}` : destination.value;
  return name + (protocol === null ? "" : ` ${protocol}`) + (protocol === null || ports.length === 0 ? "" : `:${ports.join(",")}`);
}

export const toPolicy = (f: Fields): Policy => ({
  name: f.text("name"),
  rules: f.objects("rules", (r) => ({ action: r.text("action"), rule: ruleText(r) }), "a rule"),
  holders: f.texts("holders"),
  dns: f.maybeText("dns") ?? "",
});

const toExitStatus = (f: Fields): ExitStatus => ({ code: f.number("code"), signal: f.number("signal") });

export const toCommandInfo = (f: Fields): CommandInfo => {
  const ended = f.maybeObject("exit_status", toExitStatus, "an exit status");
  return {
    id: f.text("exec"),
    sandbox: f.text("sandbox"),
    command: f.texts("command"),
    state: f.text("state"),
    exitCode: ended?.code ?? null,
    signal: ended?.signal || null,
    startedAt: f.time("started_at"),
    exitedAt: f.maybeTime("exited_at"),
    lostBytes: f.maybeNumber("lost_bytes") ?? 0,
  };
};

export const toProcessInfo = (f: Fields): ProcessInfo => ({
  name: f.text("name"),
  command: f.texts("command"),
  restart: f.object(
    "restart",
    (r) => ({ policy: r.text("policy"), retries: r.maybeNumber("retries") ?? 0, backoff: r.maybeReal("backoff") ?? 0 }),
    "a restart policy",
  ),
  killed: f.flag("killed"),
  status: f.object(
    "status",
    (s) => ({
      state: s.text("state"),
      restarts: s.maybeNumber("restarts") ?? 0,
      exit: s.maybeObject("exit", toExitStatus, "an exit status"),
      startedAt: s.maybeTime("started_at"),
    }),
    "a process's status",
  ),
  env: f.texts("env"),
  workdir: f.maybeText("workdir"),
  user: f.maybeText("user"),
});

const toRule = (f: Fields): EffectiveRule => ({
  id: f.text("id"),
  action: f.text("action"),
  rule: ruleText(f),
  implied: f.maybeText("implied"),
});

export const toSandboxInfo = (f: Fields): SandboxInfo => ({
  id: f.text("id"),
  image: f.text("image"),
  provider: f.text("provider"),
  state: f.text("state"),
  resources: f.object(
    "resources",
    (r) => ({
      memoryMiB: r.number("memory_mib"),
      vcpus: r.number("vcpus"),
      diskMiB: r.number("disk_mib"),
      swapMiB: r.number("swap_mib"),
    }),
    "a sandbox's resources",
  ),
  createdAt: f.time("created_at"),
  name: f.maybeText("name"),
  digest: f.maybeText("digest"),
  snapshot: f.maybeText("snapshot"),
  forkedFrom: f.maybeText("forked_from"),
  kernel: f.maybeText("kernel"),
  stoppedReason: f.maybeText("stopped_reason"),
  failedReason: f.maybeText("failed_reason"),
  oom: f.maybeObject(
    "oom",
    (o) => ({ kills: o.number("kills"), killedAt: o.time("killed_at"), restartAt: o.maybeTime("restart_at") }),
    "a sandbox's oom",
  ),
  processes: f.objects("processes", toProcessInfo, "a process"),
  secrets: f.texts("secrets"),
  policy: f.maybeText("policy"),
  ports: f.objects("ports", (p) => ({ hostPort: p.number("host_port"), guestPort: p.number("guest_port"), public: p.flag("public") }), "a port"),
  startedAt: f.maybeTime("started_at"),
  egress: f.maybeObject("egress", (e) => ({ rules: e.objects("rules", toRule, "a rule"), missing: e.flag("missing") }), "a sandbox's egress"),
});

export const toVersion = (f: Fields): Version => ({ version: f.text("version"), apiVersion: f.text("api_version") });

export const toCapabilities = (f: Fields): Capabilities => ({
  create: f.flag("create"),
  start: f.flag("start"),
  stop: f.flag("stop"),
  remove: f.flag("remove"),
  pause: f.flag("pause"),
  resume: f.flag("resume"),
  fork: f.flag("fork"),
  snapshot: f.flag("snapshot"),
  port: f.flag("port"),
  swap: f.flag("swap"),
});

export const toProviderInfo = (f: Fields): ProviderInfo => ({
  name: f.text("name"),
  available: f.flag("available"),
  reason: f.maybeText("reason"),
  default: f.flag("default"),
  version: f.maybeText("version"),
  capabilities: f.object("capabilities", toCapabilities, "capabilities"),
});

export const toPort = (f: Fields): Port => ({
  sandbox: f.text("sandbox"),
  sandboxName: f.maybeText("sandbox_name"),
  hostPort: f.number("host_port"),
  guestPort: f.number("guest_port"),
  public: f.flag("public"),
  address: f.text("address"),
  listening: f.flag("listening"),
  error: f.maybeText("error"),
  reachableOn: f.objects("reachable_on", (a) => ({ interface: a.text("interface"), address: a.text("address") }), "an address"),
});

export const toFileInfo = (f: Fields): FileInfo => ({
  type: f.text("type"),
  size: f.number("size"),
  mode: f.number("mode"),
  uid: f.number("uid"),
  gid: f.number("gid"),
  mtime: f.time("mtime"),
});

export const toFileEntry = (f: Fields): FileEntry => ({ name: f.text("name"), ...toFileInfo(f) });

export const toFileEvent = (f: Fields): FileEvent => ({
  type: f.text("type"),
  path: f.text("path"),
  movedFrom: f.maybeText("from"),
  isDir: f.flag("is_dir"),
  time: f.time("time"),
});

export const toSnapshot = (f: Fields): Snapshot => ({
  id: f.text("id"),
  name: f.maybeText("name"),
  source: f.text("source"),
  sourceName: f.maybeText("source_name"),
  image: f.text("image"),
  digest: f.text("digest"),
  provider: f.text("provider"),
  diskMiB: f.number("disk_mib"),
  memoryMiB: f.number("memory_mib"),
  size: f.number("size"),
  createdAt: f.time("created_at"),
});

export const toSecretInfo = (f: Fields): SecretInfo => ({
  name: f.text("name"),
  destinations: f.texts("destinations"),
  placeholder: f.text("placeholder"),
  updatedAt: f.time("updated_at"),
});

export const toEgressDecision = (f: Fields): EgressDecision => ({
  time: f.time("time"),
  source: f.text("source"),
  verdict: f.text("verdict"),
  rule: f.text("rule"),
  host: f.maybeText("host"),
  port: f.maybeNumber("port"),
  address: f.maybeText("address"),
  protocol: f.maybeText("protocol"),
  ruleText: f.maybeText("rule_text"),
  reason: f.maybeText("reason"),
});
