// What needs no shard: the parts that no vector or scenario covers, against small servers of this file.

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { appendFileSync, linkSync, lstatSync, mkdirSync, mkdtempSync, readFileSync, readdirSync, readlinkSync, rmSync, statSync, symlinkSync, truncateSync, utimesSync, writeFileSync } from "node:fs";
import { open } from "node:fs/promises";
import { createServer, type IncomingMessage, type RequestListener, type Server } from "node:http";
import type { AddressInfo, Socket } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, test } from "node:test";
import * as useshards from "useshards";
import { asyncDispose } from "../dist/dispose.js";
import { Output } from "../dist/output.js";
import { pack } from "../dist/pack.js";
import { resolve } from "../dist/settings.js";
import { entries } from "../dist/tar.js";
import { bounds } from "../dist/transport.js";
import { unpack } from "../dist/unpack.js";
import { packageVersion } from "../dist/version.js";
import { acceptOf } from "../dist/websocket.js";
import { frame } from "./scripted.js";

process.removeAllListeners("warning"); // that the remote is http

const temporary = mkdtempSync(join(tmpdir(), "useshards-unit-"));
const open_: { server: Server; shard: useshards.Shard; sockets: Set<Socket> }[] = [];
const standard = { ...bounds };

afterEach(() => {
  Object.assign(bounds, standard);
  for (const { server, shard, sockets } of open_.splice(0)) {
    shard.close();
    for (const socket of sockets) socket.destroy();
    server.close();
  }
});
after(() => rmSync(temporary, { recursive: true }));

const box = {
  id: "amber-acorn-0a1b",
  image: "i",
  provider: "runc",
  state: "running",
  resources: { memory_mib: 0, vcpus: 0, disk_mib: 0, swap_mib: 0 },
  created_at: "2026-01-02T03:04:05Z",
};
const command = { exec: "e1", sandbox: box.id, command: ["x"], state: "running", exit_status: null, started_at: box.created_at, exited_at: null, truncated: false, lost_bytes: 0 };

/** A server that answers GET of the sandbox and POST of a command, and the rest as it is told. */
async function serve(rest: RequestListener, upgrade?: (request: IncomingMessage, socket: Socket) => void): Promise<{ shard: useshards.Shard; sandbox: useshards.Sandbox; sockets: Set<Socket> }> {
  const sockets = new Set<Socket>();
  const server = createServer((request, response) => {
    if (request.url === `/v0/sandboxes/${box.id}`) response.end(JSON.stringify(box));
    else if (request.method === "POST" && request.url!.endsWith("/exec")) response.writeHead(201).end(JSON.stringify(command));
    else rest(request, response);
    request.resume();
  });
  server.on("connection", (socket: Socket) => {
    sockets.add(socket);
    socket.on("error", () => undefined).on("close", () => sockets.delete(socket));
    socket.on("end", () => socket.end());
  });
  if (upgrade !== undefined) {
    server.on("upgrade", (request, socket) => {
      socket.write(`HTTP/1.1 101 x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: ${acceptOf(request.headers["sec-websocket-key"]!)}\r\n\r\n`);
      upgrade(request, socket as Socket);
      socket.resume();
    });
  }
  await new Promise<void>((done) => server.listen(0, "127.0.0.1", done));
  const shard = new useshards.Shard({ remote: `http://127.0.0.1:${(server.address() as AddressInfo).port}`, apiKey: "k" });
  open_.push({ server, shard, sockets });
  return { shard, sandbox: await shard.get(box.id), sockets };
}

const emptied = async (set: Set<unknown>): Promise<void> => {
  for (let i = 0; i < 500 && set.size > 0; i++) await new Promise((r) => setTimeout(r, 10));
  assert.equal(set.size, 0, "connections that are still open");
};

test("the version is the package's, and the names are those of the contract", () => {
  const manifest = JSON.parse(readFileSync(new URL("../package.json", import.meta.url), "utf8"));
  assert.equal(packageVersion, manifest.version);
  assert.equal(manifest.dependencies, undefined);
  assert.equal(useshards.defaultOutputLimit, 8 * 1024 * 1024);
  const { APIError, ShardError, ConflictError, UnsupportedError } = useshards;
  assert.ok(new UnsupportedError(409, "unsupported", "no") instanceof APIError);
  assert.ok(!(new UnsupportedError(409, "unsupported", "no") instanceof ConflictError));
  assert.ok(new APIError(429, "exec_limit", "no") instanceof ShardError);
  assert.equal(asyncDispose, Symbol.asyncDispose ?? Symbol.for("Symbol.asyncDispose")); // Node before 20.5 has none
  assert.equal(typeof useshards.Shard.prototype[asyncDispose], "function");
  assert.equal(typeof useshards.Sandbox.prototype[asyncDispose], "function");
});

test("a CA file must hold certificates", () => {
  const file = join(temporary, "ca.pem");
  const take = (text: string): unknown => {
    writeFileSync(file, text);
    return resolve({ remote: "https://a.example", apiKey: "secret", caFile: file }, {});
  };
  for (const text of ["", "hello", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]) {
    assert.throws(() => take(text), (e: Error) => e instanceof useshards.ConfigurationError && !e.message.includes("secret"));
  }
});

test("output keeps the newest bytes, and only a cut first character is a mark", () => {
  for (const limit of [0, 1, 2, 3, 5, 8, 100, 70_000]) {
    const output = new Output(limit);
    let all = "";
    for (let i = 0; i < 3000; i++) {
      const piece = ["a", "é", "😀", "xyz".repeat(40)][i % 4]!;
      all += piece;
      for (const byte of Buffer.from(piece)) output.add(1, Uint8Array.of(byte));
    }
    const kept = output.data(1);
    const whole = Buffer.from(all);
    assert.equal(kept.toString("hex"), (limit === 0 ? Buffer.alloc(0) : whole.subarray(-limit)).toString("hex"));
    const text = output.text(1, false);
    assert.ok(all.endsWith(text.replace(/^\ufffd/, "")), `limit ${limit}`);
  }
  const both = new Output(10);
  both.add(1, Buffer.from("0123456789"));
  both.add(2, Buffer.from("fatal"));
  assert.deepEqual([both.text(1, false), both.text(2, false)], ["56789", "fatal"]);
});

test("a server that is silent on a stream ends a wait; input that nobody reads does not", async () => {
  bounds.beat = 100;
  const dumb = await serve(
    (_, response) => response.end(JSON.stringify(command)),
    () => undefined, // takes everything, answers nothing
  );
  const begin = Date.now();
  await assert.rejects(dumb.sandbox.exec("x"), (e: Error) => e instanceof useshards.ShardConnectionError && /no sign of life.*still running/.test(e.message));
  assert.ok(Date.now() - begin < 10_000);

  // The same silence, but a command that has not read its input may be the reason, and the server answers elsewhere.
  const stuck = await serve(
    (request, response) => response.end(JSON.stringify(request.url === "/v0/version" ? { version: "1", api_version: "v0" } : command)),
    (_, socket) => void setTimeout(() => socket.write(Buffer.concat([frame(2, Buffer.from('\x03{"code":0,"signal":0}')), frame(8, Buffer.alloc(0))])), 1500),
  );
  assert.equal((await stuck.sandbox.exec("x", { stdin: "input" })).exitCode, 0);
  await emptied(stuck.sockets);
});

test("a server that is dead ends a call that waits", async () => {
  bounds.beat = 50;
  bounds.request = 500;
  const { sandbox } = await serve(() => undefined);
  await assert.rejects(sandbox.stop(), useshards.ShardConnectionError);
});

test("a call may take longer than an idle connection lives", async () => {
  const { sandbox } = await serve((request, response) => void setTimeout(() => response.end(JSON.stringify(request.url === "/v0/version" ? {} : box)), request.url === "/v0/version" ? 0 : 5_000));
  await sandbox.stop();
});

test("a slow callback is waited for, and nothing is lost meanwhile", async () => {
  bounds.beat = 100;
  const pieces = 64;
  const { sandbox } = await serve(
    () => undefined,
    async (_, socket) => {
      for (let i = 0; i < pieces; i++) socket.write(frame(2, Buffer.concat([Buffer.of(1), Buffer.alloc(64 << 10, i)])));
      socket.write(frame(2, Buffer.from('\x03{"code":0,"signal":0}')));
      socket.write(frame(8, Buffer.alloc(0)));
    },
  );
  let seen = 0;
  const result = await sandbox.exec("x", {
    outputLimitBytes: 10,
    onStdout: async (chunk) => {
      assert.equal(chunk[0], seen++);
      if (seen === 1) await new Promise((r) => setTimeout(r, 1000)); // many heartbeats
    },
  });
  assert.equal(seen, pieces);
  assert.equal(result.stdout.length, 10);
});

test("what a callback throws is what exec rejects with", async () => {
  const { sandbox, sockets } = await serve(
    () => undefined,
    (_, socket) => void socket.write(frame(2, Buffer.from("\x01a"))),
  );
  const mine = new Error("mine");
  await assert.rejects(sandbox.exec("x", { onStdout: () => Promise.reject(mine) }), (e) => e === mine);
  await emptied(sockets);
});

test("an abort rejects with its reason at every stage and gives the connection back", async () => {
  const { shard, sandbox, sockets } = await serve(
    () => undefined, // never answers
    () => undefined,
  );
  const reason = { mine: true };
  const calls: ((signal: AbortSignal) => Promise<unknown>)[] = [
    (signal) => shard.version({ signal }),
    (signal) => shard.create({ image: "i", signal }),
    (signal) => sandbox.stop({ signal }),
    (signal) => sandbox.exec("x", { signal }),
    (signal) => sandbox.exec("x", { signal, stdin: "y".repeat(4 << 20) }),
    async (signal) => (await sandbox.exec("x", { background: true })).wait({ signal }),
    (signal) => sandbox.files.write("/x", Buffer.alloc(32 << 20), { signal }),
    (signal) => sandbox.files.read("/x", { signal }),
    (signal) => sandbox.files.download("/x", join(temporary, "never"), { signal }),
    (signal) => sandbox.files.downloadDir("/x", join(temporary, "never"), { signal }),
    (signal) => sandbox.files.uploadDir(temporary, "/x", { signal }),
    async (signal) => {
      for await (const _ of sandbox.followEgressLog({ signal }));
    },
  ];
  for (const delay of [0, 1, 30]) {
    for (const call of calls) {
      const controller = new AbortController();
      if (delay > 0) setTimeout(() => controller.abort(reason), delay);
      else controller.abort(reason);
      await assert.rejects(call(controller.signal), (e) => e === reason, call.toString());
    }
  }
  assert.deepEqual(readdirSync(temporary).filter((name) => name.startsWith("never") || name.startsWith(".shard")), []);
  shard.close();
  await emptied(sockets);
});

test("a follow opens lazily, and return() ends one that waits", async () => {
  let opened = 0;
  const { sandbox, sockets } = await serve(
    () => undefined,
    (_, socket) => {
      opened++;
      socket.resume();
    },
  );
  const idle = sockets.size;
  const unused = sandbox.followEgressLog();
  await unused.return();
  assert.deepEqual(await unused.next(), { done: true, value: undefined });
  assert.equal(opened, 0);
  const follow = sandbox.followEgressLog();
  const next = follow.next();
  while (opened === 0) await new Promise((r) => setTimeout(r, 5));
  await follow.return();
  assert.deepEqual(await next, { done: true, value: undefined });
  for (let i = 0; i < 500 && sockets.size > idle; i++) await new Promise((r) => setTimeout(r, 10));
  assert.ok(sockets.size <= idle);
});

test("close() ends what is under way, and nothing works after it", async () => {
  const { shard, sandbox, sockets } = await serve(
    () => undefined,
    () => undefined,
  );
  const waits = [shard.version(), sandbox.exec("x")];
  await new Promise((r) => setTimeout(r, 100));
  shard.close();
  shard.close();
  for (const wait of waits) await assert.rejects(wait, (e: Error) => e instanceof useshards.ShardConnectionError, "closed");
  await assert.rejects(shard.version(), /closed/);
  await emptied(sockets);
});

test("a pooled connection that the server has dropped is no failure of a read", async () => {
  let count = 0;
  const { shard, sockets } = await serve((_, response) => {
    count++;
    response.end(JSON.stringify({ version: "1", api_version: "v0" }));
  });
  for (let i = 0; i < 20; i++) {
    assert.equal((await shard.version()).version, "1");
    for (const socket of sockets) socket.destroy();
  }
  assert.equal(count, 20);
});

test("an upload whose file grows or shrinks is never whole", async () => {
  const received: { length: number; whole: boolean }[] = [];
  const { sandbox } = await serve((request, response) => {
    let length = 0;
    request.on("data", (chunk: Buffer) => (length += chunk.length));
    request.on("end", () => {
      received.push({ length, whole: request.complete });
      response.writeHead(204).end();
    });
    request.on("error", () => received.push({ length, whole: false }));
  });
  const file = join(temporary, "changing");
  for (const change of [(): void => appendFileSync(file, "more"), (): void => truncateSync(file, 1 << 20)]) {
    writeFileSync(file, Buffer.alloc(24 << 20, "x"));
    const upload = sandbox.files.upload(file, "/x");
    setTimeout(change, 2);
    await assert.rejects(upload, useshards.UnknownLengthError).catch((error: unknown) => {
      if (received.at(-1)?.whole !== true) throw error; // else it was over before the change
    });
  }
  await assert.rejects(sandbox.files.upload("/dev/null", "/x"), useshards.UnknownLengthError);
  await assert.rejects(sandbox.files.upload(temporary, "/x"), { code: "EISDIR" });
});

test("bad arguments are native errors", async () => {
  const { shard, sandbox } = await serve(() => undefined);
  const wrong: [() => Promise<unknown>, typeof TypeError | typeof RangeError][] = [
    [() => shard.create({}), TypeError],
    [() => shard.create({ image: "a", snapshot: "b" }), TypeError],
    [() => shard.create({ image: "a", memoryMiB: -1 }), RangeError],
    [() => shard.create({ image: "a", vcpus: 0.5 }), RangeError],
    [() => shard.get(""), TypeError],
    [() => sandbox.exec([]), TypeError],
    [() => sandbox.exec("x", { stdin: true }), TypeError],
    [() => sandbox.exec("x", { outputLimitBytes: -1 }), RangeError],
    [() => sandbox.exec("x", { tty: { rows: -1, cols: 1 } }), RangeError],
    [() => sandbox.files.write("/x", "", { mode: 0o1000 }), RangeError],
    [() => sandbox.ports.add(0, 1), RangeError],
    [() => sandbox.run("x", { restart: { policy: "always", backoff: 61 } }), RangeError],
  ];
  for (const [call, type] of wrong) await assert.rejects(call, type, call.toString());
});

test("a packed tree is what tar unpacks, and what we unpack", async () => {
  const tree = join(temporary, "tree");
  mkdirSync(join(tree, "empty"), { recursive: true });
  mkdirSync(join(tree, "deep", "d".repeat(120)), { recursive: true });
  writeFileSync(join(tree, "a"), "a".repeat(1025), { mode: 0o640 });
  writeFileSync(join(tree, "deep", "d".repeat(120), "né 😀"), Buffer.alloc(3 << 20, "z"));
  writeFileSync(Buffer.concat([Buffer.from(`${tree}/`), Buffer.from([0x66, 0xff])]), "bytes");
  linkSync(join(tree, "a"), join(tree, "hard"));
  symlinkSync("a", join(tree, "soft"));
  symlinkSync("x".repeat(150), join(tree, "dangling"));
  utimesSync(join(tree, "a"), 1_600_000_000.25, 1_600_000_000.25);
  const chunks: Buffer[] = [];
  for await (const chunk of pack(tree)) chunks.push(chunk);
  const file = join(temporary, "tree.tar");
  writeFileSync(file, Buffer.concat(chunks));

  const theirs = join(temporary, "theirs");
  const ours = join(temporary, "ours");
  mkdirSync(theirs);
  mkdirSync(ours);
  const done = spawnSync("tar", ["-xf", file, "-C", theirs], { encoding: "utf8" });
  assert.equal(done.status, 0, done.stderr);
  const spool = await open(file);
  await unpack(spool, statSync(file).size, ours, true, undefined);
  await spool.close();
  for (const copy of [theirs, ours]) {
    assert.equal(spawnSync("diff", ["-r", "--no-dereference", tree, copy], { encoding: "utf8" }).stdout, "");
    assert.equal(lstatSync(join(copy, "a")).ino, lstatSync(join(copy, "hard")).ino);
    assert.equal(lstatSync(join(copy, "a")).mode & 0o777, 0o640);
    assert.ok(Math.abs(lstatSync(join(copy, "a")).mtimeMs - 1_600_000_000_250) < 1);
    assert.equal(readlinkSync(join(copy, "dangling")).length, 150);
  }
});

test("no tar of random bytes crashes the reader", async () => {
  const chunks: Buffer[] = [];
  const tree = join(temporary, "small");
  mkdirSync(tree);
  writeFileSync(join(tree, "f"), "hello");
  symlinkSync("f", join(tree, "n".repeat(130)));
  for await (const chunk of pack(tree)) chunks.push(chunk);
  const good = Buffer.concat(chunks);
  let seed = 42;
  const random = (n: number): number => (seed = (seed * 1103515245 + 12345) & 0x7fffffff) % n;
  for (let round = 0; round < 3000; round++) {
    const bad = Buffer.from(good).subarray(0, random(10) === 0 ? random(good.length) : good.length);
    for (let i = random(4); i >= 0 && bad.length > 0; i--) bad[random(bad.length)] = random(256);
    try {
      for await (const _ of entries(async (at, size) => bad.subarray(at, at + size), bad.length));
    } catch (error) {
      assert.ok(error instanceof useshards.UnsafeArchiveError, String((error as Error).stack));
    }
  }
});
