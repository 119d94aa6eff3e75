/** The three settings: where the server is, the key, and the CA that signed the server's certificate. */

import { X509Certificate } from "node:crypto";
import { readFileSync } from "node:fs";
import { ConfigurationError } from "./errors.js";

/** How a Shard reaches its server. What is left out comes from the environment. */
export interface ShardOptions {
  /**
   * The URL of `shard serve`: http or https, host, and a port where it is not 80 or 443. Default: SHARD_REMOTE.
   * An http remote works, but sends the key unencrypted: the process emits a warning.
   */
  remote?: string | undefined;
  /** The API key, as `shard tokens mint` prints it. Default: SHARD_API_KEY. */
  apiKey?: string | undefined;
  /** A PEM file of the CA that signed the server's certificate, for an https remote only. Default: SHARD_CA_FILE. */
  caFile?: string | undefined;
}

/** Checked settings. */
export interface Settings {
  /** Scheme, host and port, without a slash at the end. */
  readonly remote: string;
  readonly secure: boolean;
  readonly host: string;
  readonly port: number;
  readonly apiKey: string;
  readonly ca: string | undefined;
}

/** Options first, then the environment. Throws ConfigurationError. */
export function resolve(options: ShardOptions, env: NodeJS.ProcessEnv = process.env): Settings {
  const url = checkRemote(options.remote || env["SHARD_REMOTE"] || "");
  const apiKey = checkKey(options.apiKey, env["SHARD_API_KEY"]);
  const caFile = options.caFile || env["SHARD_CA_FILE"];
  let ca: string | undefined;
  if (!url.secure) {
    if (caFile) throw new ConfigurationError("caFile: a CA file is for an https remote, and the remote is http");
    process.emitWarning("the remote is http: the API key and everything else is sent unencrypted", "ShardWarning");
  } else if (caFile) {
    ca = readCA(caFile);
  }
  return { ...url, apiKey, ca };
}

function checkRemote(given: string): Pick<Settings, "remote" | "secure" | "host" | "port"> {
  const wrong = (what: string): ConfigurationError => new ConfigurationError(`remote: ${what}`);
  const text = given.trim();
  if (text === "") throw wrong("not set: pass remote or set SHARD_REMOTE to the URL of shard serve");
  if (/[\x00-\x20\x7f\\]/.test(text)) throw wrong("the URL holds a space, a backslash or a control character");
  const parts = /^([A-Za-z][A-Za-z0-9+.-]*):\/\/([^/?#]*)(.*)$/.exec(text);
  if (parts === null) throw wrong("the URL has no scheme: write https://host or https://host:port");
  const [scheme, authority, rest] = [parts[1]!.toLowerCase(), parts[2]!, parts[3]!];
  if (scheme !== "http" && scheme !== "https") throw wrong(`the scheme "${scheme}" is not http or https`);
  if (authority.includes("@")) throw wrong("the URL holds a user: the API key is a setting of its own");
  if (rest !== "" && rest !== "/") throw wrong("the URL goes on after the host: only scheme, host and port belong there");
  const named = /^((?!-)[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[^:]*)?$/.exec(authority);
  let hostname = "";
  try {
    hostname = new URL(`${scheme}://${named?.[1] ?? ""}`).hostname;
  } catch {
    // said below
  }
  if (named === null || hostname === "") throw wrong("the URL has no valid host: write https://host or https://host:port");
  const digits = named[2]?.slice(1);
  const port = digits === undefined ? (scheme === "https" ? 443 : 80) : /^[0-9]{1,5}$/.test(digits) ? Number(digits) : 0;
  if (port < 1 || port > 65535) throw wrong("the port is not a number from 1 to 65535");
  const remote = `${scheme}://${named[1]}${digits === undefined ? "" : `:${port}`}`;
  return { remote, secure: scheme === "https", host: hostname.replace(/^\[|\]$/g, ""), port };
}

/** No message ever shows the key. */
function checkKey(given: string | undefined, env: string | undefined): string {
  const key = given ?? env?.trim() ?? "";
  if (key.trim() === "") {
    throw new ConfigurationError(given === undefined ? "apiKey: not set: pass apiKey or set SHARD_API_KEY" : "apiKey: the key is empty");
  }
  if (!/^[\x21-\x7e]+$/.test(key)) {
    throw new ConfigurationError("apiKey: the key holds a space, a control character or one beyond ASCII");
  }
  return key;
}

function readCA(file: string): string {
  let pem: string;
  try {
    pem = readFileSync(file, "utf8");
  } catch (error) {
    throw new ConfigurationError(`caFile: cannot read ${file}: ${(error as NodeJS.ErrnoException).code ?? "unknown reason"}`);
  }
  const blocks = pem.match(/-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----/g) ?? [];
  try {
    if (blocks.length === 0) throw new Error("empty");
    for (const block of blocks) new X509Certificate(block);
  } catch {
    throw new ConfigurationError(`caFile: cannot read ${file}: it holds no certificate, or a damaged one`);
  }
  return blocks.join("\n");
}
