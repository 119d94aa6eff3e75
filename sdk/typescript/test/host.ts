// A real daemon and a real `shard serve` over TLS, in a private root of which nothing is left when the tests end.

import { spawn, spawnSync, type ChildProcess } from "node:child_process";
import { chmodSync, closeSync, copyFileSync, existsSync, mkdirSync, mkdtempSync, openSync, readFileSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { createConnection, createServer, type AddressInfo } from "node:net";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const repository = fileURLToPath(new URL("../../../", import.meta.url));
const bin = process.env["SHARD_TEST_BIN"] ?? join(repository, "bin");
const shard = join(bin, "shard");

/** Why live tests cannot run here, false when they can. */
export function missing(): string | false {
  if (process.getuid?.() !== 0) return "only root can make sandboxes";
  if (!existsSync(shard)) return `${shard} is not built: run make`;
  if (spawnSync(shard, ["serve", "--help"]).status !== 0) return `${shard} has no serve`;
  if (spawnSync("busybox", ["true"]).status !== 0) return "there is no busybox to make an image of: install busybox-static";
  return false;
}

/** One daemon with one provider, and one server in front of it. */
export class Host {
  readonly root: string = mkdtempSync("/tmp/st");
  remote = "";
  apiKey = "";
  caFile = "";
  readonly #log: number;
  readonly #children: ChildProcess[] = [];
  readonly #env: NodeJS.ProcessEnv;

  constructor() {
    this.#log = openSync(join(this.root, "test.log"), "a");
    const inherited = Object.entries(process.env).filter(([name]) => !name.startsWith("SHARD_"));
    this.#env = { ...Object.fromEntries(inherited), XDG_CONFIG_HOME: join(this.root, "no-config") };
  }

  async start(provider: string): Promise<void> {
    const daemon = this.#spawn("daemon", "--provider", provider);
    await this.#until(daemon, () => createConnection(join(this.root, "shard.sock")));
    this.apiKey = JSON.parse(this.cli("tokens", "mint", "--name", "tests")).token;
    const port = await freePort();
    const server = this.#spawn("serve", "--listen", `127.0.0.1:${port}`, "--tls-self-signed");
    await this.#until(server, () => createConnection(port, "127.0.0.1"));
    this.remote = `https://127.0.0.1:${port}`;
    this.caFile = this.#find("ca.crt");
  }

  /** Runs the command line against the daemon. */
  cli(...args: string[]): string {
    const done = spawnSync(shard, ["--root", this.root, ...args], { env: this.#env, encoding: "utf8", maxBuffer: 1 << 28 });
    if (done.status !== 0) throw new Error(`shard ${args.join(" ")}: ${done.stderr}\n${this.log()}`);
    return done.stdout;
  }

  /** What the programs said. */
  log(): string {
    return readFileSync(join(this.root, "test.log"), "utf8");
  }

  /** An image of busybox alone, under the name that the guide's Python image has. */
  importBusybox(): string {
    const tree = join(this.root, "busybox");
    for (const folder of ["bin", "etc/ssl/certs", "tmp", "root", "proc", "sys", "dev", "var"]) mkdirSync(join(tree, folder), { recursive: true });
    chmodSync(join(tree, "tmp"), 0o1777);
    const where = spawnSync("sh", ["-c", "command -v busybox"], { encoding: "utf8" }).stdout.trim();
    copyFileSync(where, join(tree, "bin/busybox"));
    for (const applet of spawnSync("busybox", ["--list"], { encoding: "utf8" }).stdout.split("\n")) {
      if (applet !== "" && applet !== "busybox") symlinkSync("busybox", join(tree, "bin", applet));
    }
    writeFileSync(join(tree, "etc/passwd"), "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n");
    writeFileSync(join(tree, "etc/group"), "root:x:0:\nnobody:x:65534:\n");
    copyFileSync(this.caFile, join(tree, "etc/ssl/certs/ca-certificates.crt")); // secrets need a trust file
    this.cli("image", "import", "--env", "PATH=/bin", tree, "local/busybox:1");
    rmSync(tree, { recursive: true });
    return "local/busybox:1";
  }

  /** The Python image that the demo builds from the distribution's packages, under the name that the guide uses. */
  importPython(): string {
    const built = spawnSync(join(repository, "demo/build-image"), { encoding: "utf8" });
    if (built.status !== 0) throw new Error(built.stderr);
    this.cli("image", "import", built.stdout.trim(), "python:3.12-slim");
    return "python:3.12-slim";
  }

  /** The pid of the server in front of the daemon. */
  get server(): ChildProcess {
    return this.#children[1]!;
  }

  /** Removes every sandbox, ends the programs, and leaves nothing. */
  async close(): Promise<void> {
    try {
      for (const ref of this.cli("list", "--all", "-q").split("\n").filter(Boolean)) this.cli("remove", "--force", ref);
    } catch {
      // the daemon has gone
    }
    for (const child of this.#children.reverse()) {
      if (child.exitCode !== null || child.signalCode !== null) continue;
      const ended = new Promise((resolve) => child.once("exit", resolve));
      child.kill("SIGTERM");
      const late = setTimeout(() => child.kill("SIGKILL"), 60_000);
      await ended;
      clearTimeout(late);
    }
    closeSync(this.#log);
    rmSync(this.root, { recursive: true, force: true });
  }

  #spawn(...args: string[]): ChildProcess {
    const child = spawn(shard, ["--root", this.root, ...args], { env: this.#env, stdio: ["ignore", this.#log, this.#log] });
    this.#children.push(child);
    return child;
  }

  async #until(child: ChildProcess, connect: () => ReturnType<typeof createConnection>): Promise<void> {
    for (const deadline = Date.now() + 60_000; ; ) {
      const connected = await new Promise<boolean>((resolve) => {
        const socket = connect();
        socket.once("connect", () => resolve(true)).once("error", () => resolve(false));
        socket.once("connect", () => socket.destroy());
      });
      if (connected) return;
      if (child.exitCode !== null || Date.now() > deadline) throw new Error(`the program does not listen:\n${this.log()}`);
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
  }

  #find(name: string): string {
    const found = spawnSync("find", [this.root, "-name", name], { encoding: "utf8" }).stdout.split("\n")[0];
    if (!found) throw new Error(`there is no ${name}`);
    return found;
  }
}

async function freePort(): Promise<number> {
  const server = createServer().listen(0, "127.0.0.1");
  await new Promise((resolve) => server.once("listening", resolve));
  const { port } = server.address() as AddressInfo;
  await new Promise((resolve) => server.close(resolve));
  return port;
}
