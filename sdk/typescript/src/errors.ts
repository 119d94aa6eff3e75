/** Every error of the SDK, and how an answer of the server becomes one of them. Knows no sockets. */

/** What an answer that is not ours may add to a message, in bytes. */
const quoted = 512;

/** The status that each code of a stream's closing error implies; an unknown code counts as 500. */
const statusOf: Readonly<Record<string, number>> = {
  invalid_request: 400,
  unauthorized: 401,
  forbidden: 403,
  not_found: 404,
  no_process: 404,
  sandbox_not_running: 409,
  sandbox_not_stopped: 409,
  sandbox_not_paused: 409,
  sandbox_live: 409,
  sandbox_failed: 409,
  no_checkpoint: 409,
  unsupported: 409,
  in_use: 409,
  name_taken: 409,
  exec_exited: 409,
  exec_running: 409,
  process_limit: 409,
  body_too_large: 413,
  command_not_started: 422,
  exec_limit: 429,
  internal: 500,
  timeout: 504,
};

/**
 * The root of every error that comes from the server, the connection or the settings. A bad argument is a TypeError or
 * a RangeError instead, and a local file's trouble is Node's own error with its `code`.
 *
 * @example
 * try { await shard.get("web"); } catch (error) { if (error instanceof ShardError) console.log(error.message); }
 */
export class ShardError extends Error {
  static {
    named(this, "ShardError");
  }
}

/** A setting is missing or refused. The message names the setting and never shows the API key. */
export class ConfigurationError extends ShardError {
  static {
    named(this, "ConfigurationError");
  }
}

/**
 * The server is not reachable, did not answer in time, or a stream ended before what it carries did. A command that this
 * happens to keeps running.
 */
export class ShardConnectionError extends ShardError {
  static {
    named(this, "ShardConnectionError");
  }
}

/** The server's answer cannot be read: it is not JSON, lacks a field, or breaks the stream's rules. */
export class ProtocolError extends ShardError {
  static {
    named(this, "ProtocolError");
  }
}

/** A command or process never ran. */
export class CommandNotStartedError extends ShardError {
  static {
    named(this, "CommandNotStartedError");
  }
  /** What a shell would report: 127 when the program does not exist, 126 when it cannot run. */
  readonly exitCode: number;
  /** Why, as the server says it. */
  readonly reason: string;

  constructor(exitCode: number, reason: string) {
    super(`${reason} (exit code ${exitCode})`);
    this.exitCode = exitCode;
    this.reason = reason;
  }
}

/**
 * What is to be sent has no known length: it cannot be measured, or it grew or shrank on the way. Nothing was written: a
 * file appears in the sandbox complete or not at all.
 */
export class UnknownLengthError extends ShardError {
  static {
    named(this, "UnknownLengthError");
  }
}

/** A directory that came out of a sandbox holds something that must not land on this machine. */
export class UnsafeArchiveError extends ShardError {
  static {
    named(this, "UnsafeArchiveError");
  }
  /** The entry's name in the archive, "" when the archive itself is at fault. */
  readonly entry: string;
  /** What is wrong with it. */
  readonly reason: string;

  constructor(entry: string, reason: string) {
    super(entry === "" ? reason : `${entry}: ${reason}`);
    this.entry = entry;
    this.reason = reason;
  }
}

/** The server refused the request. Its subclasses say why; `code` says it most exactly. */
export class APIError extends ShardError {
  static {
    named(this, "APIError");
  }
  /** The HTTP status. */
  readonly status: number;
  /** The server's code, such as "not_found"; "" when the answer carried none. New codes may appear. */
  readonly code: string;
  /** What is wrong and what to do, without status and code. */
  readonly detail: string;
  /** With code "in_use": the names of what keeps the object in use, else empty. */
  readonly holders: string[];

  constructor(status: number, code: string, detail: string, holders: readonly string[] = []) {
    super(code === "" ? `${status}: ${detail}` : `${status} ${code}: ${detail}`);
    this.status = status;
    this.code = code;
    this.detail = detail;
    this.holders = [...holders];
  }
}

/** 400 or 413: the request is wrong as it stands; the message says where. */
export class InvalidRequestError extends APIError {
  static {
    named(this, "InvalidRequestError");
  }
}

/** 401: the API key is missing, unknown, expired or revoked. */
export class AuthenticationError extends APIError {
  static {
    named(this, "AuthenticationError");
  }
}

/** 403: the API key's scopes do not cover the request. */
export class PermissionDeniedError extends APIError {
  static {
    named(this, "PermissionDeniedError");
  }
}

/** 404: there is no such sandbox, command, process, path, snapshot, policy or secret. */
export class NotFoundError extends APIError {
  static {
    named(this, "NotFoundError");
  }
}

/** 409: the object's state or another object stands in the way; `code` says which. */
export class ConflictError extends APIError {
  static {
    named(this, "ConflictError");
  }
}

/** The sandbox's provider does not have this verb (code "unsupported"). */
export class UnsupportedError extends APIError {
  static {
    named(this, "UnsupportedError");
  }
}

/** 500 and above: the server failed; its log says more. */
export class ServerError extends APIError {
  static {
    named(this, "ServerError");
  }
}

/** Puts a class's name where console.log and stack traces look for it. */
function named(type: { prototype: Error }, name: string): void {
  Object.defineProperty(type.prototype, "name", { value: name, configurable: true, writable: true });
}

const classOf: Readonly<Record<number, typeof APIError>> = {
  400: InvalidRequestError,
  401: AuthenticationError,
  403: PermissionDeniedError,
  404: NotFoundError,
  409: ConflictError,
  413: InvalidRequestError,
};

function apiError(status: number, code: string, detail: string, holders: readonly string[] = []): APIError {
  const type = code === "unsupported" ? UnsupportedError : status >= 500 ? ServerError : (classOf[status] ?? APIError);
  return new type(status, code, detail, holders);
}

/** The error that an answer with an error status carries. A HEAD has no body, so its status must do. */
export function refusal(status: number, body: Buffer, head: boolean): ShardError {
  if (head) return apiError(status, "", "the server refused the request");
  let value: unknown;
  try {
    value = JSON.parse(body.toString("utf8"));
  } catch {
    value = undefined;
  }
  const detail = errorObject(value);
  if (detail !== undefined) return detailError(status, detail);
  if (body.length === 0) return apiError(status, "", "the server gave no reason");
  return apiError(status, "", `the server answered ${JSON.stringify(body.toString("utf8", 0, quoted))}`);
}

/** An error as the server writes it. */
export interface ErrorDetail {
  code: string;
  message: string;
  holders?: unknown;
  exit_code?: unknown;
}

/** The error of a body `{"error":{…}}`, undefined when it has another form. */
export function errorObject(body: unknown): ErrorDetail | undefined {
  if (typeof body !== "object" || body === null || !("error" in body)) return undefined;
  const detail = body.error;
  if (typeof detail !== "object" || detail === null || !("code" in detail) || !("message" in detail)) return undefined;
  return typeof detail.code === "string" && typeof detail.message === "string" ? (detail as ErrorDetail) : undefined;
}

/** The error of an error object. In a stream's last message there is no status, and the code implies it. */
export function detailError(status: number | undefined, detail: ErrorDetail): ShardError {
  if (detail.code === "command_not_started") {
    return new CommandNotStartedError(Number.isInteger(detail.exit_code) ? (detail.exit_code as number) : 126, detail.message);
  }
  const holders = Array.isArray(detail.holders) ? detail.holders.filter((h): h is string => typeof h === "string") : [];
  const implied = Object.hasOwn(statusOf, detail.code) ? statusOf[detail.code] : undefined;
  return apiError(status ?? implied ?? 500, detail.code, detail.message, holders);
}
