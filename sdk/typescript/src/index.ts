/**
 * Client of shard: sandboxes on your own servers for code that agents write. Talks to `shard serve`.
 *
 * @packageDocumentation
 */

export { Command, Commands, type ExecOptions, type OutputOptions } from "./command.js";
export {
  APIError,
  AuthenticationError,
  CommandNotStartedError,
  ConfigurationError,
  ConflictError,
  InvalidRequestError,
  NotFoundError,
  PermissionDeniedError,
  ProtocolError,
  ServerError,
  ShardConnectionError,
  ShardError,
  UnknownLengthError,
  UnsafeArchiveError,
  UnsupportedError,
} from "./errors.js";
export { Files, type MakeOptions } from "./files.js";
export type { Follow } from "./follow.js";
export type {
  Capabilities,
  CommandInfo,
  CommandResult,
  EffectiveRule,
  Egress,
  EgressDecision,
  ExitStatus,
  FileEntry,
  FileEvent,
  FileInfo,
  HostAddress,
  OOMInfo,
  Policy,
  PolicyRule,
  Port,
  PortForward,
  ProcessInfo,
  ProcessStatus,
  ProviderInfo,
  Resources,
  Restart,
  SandboxInfo,
  SecretInfo,
  Snapshot,
  TerminalSize,
  Version,
} from "./models.js";
export { defaultOutputLimit } from "./output.js";
export { Process, Processes, type RunOptions } from "./process.js";
export { Ports, Sandbox } from "./sandbox.js";
export type { ShardOptions } from "./settings.js";
export { Policies, SandboxList, SecretList, Secrets, Shard, Snapshots, type CreateOptions, type SecretOptions } from "./shard.js";
export type { CallOptions } from "./waiting.js";
