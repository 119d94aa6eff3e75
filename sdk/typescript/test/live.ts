// The live suite: a real daemon, a real shard serve over TLS, one provider. The files live-*.test.ts name it.

import assert from "node:assert/strict";
import { linkSync, lstatSync, mkdirSync, mkdtempSync, openSync, closeSync, ftruncateSync, readFileSync, readdirSync, rmSync, statSync, symlinkSync, writeFileSync, writeSync } from "node:fs";
import { connect } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { Shard, type Sandbox } from "useshards";
import * as useshards from "useshards";
import { bounds } from "../dist/transport.js";
import { heavy, type Check } from "./heavy.js";
import { Host, missing } from "./host.js";

const MiB = 1 << 20;

/** What `QUICK=1 ./check` runs of this. */
const quick = ["commands end as they end", "in the background: leaving, finding again, replay", "files one by one", "watching a directory", "named processes", "pause and resume", "secrets"];

/** Connections of this process, of whatever kind. */
const connections = (): number => process.getActiveResourcesInfo().filter((name) => /Socket|TCP|TLS/.test(name)).length;

export function live(provider: string): void {
  describe(`live on ${provider}`, { skip: missing() }, () => {
    const host = new Host();
    const local = mkdtempSync(join(tmpdir(), "useshards-live-"));
    let shard: Shard;
    let box: Sandbox;
    let image = "";
    let broken: string | undefined;

    before(async () => {
      await host.start(provider);
      image = host.importBusybox();
      shard = new Shard(host);
      try {
        box = await shard.create({ image, memoryMiB: 512, env: { FROM: "box" } });
      } catch (error) {
        broken = `the provider ${provider} does not work here: ${String(error)}`;
      }
      if (box?.info.state === "failed") broken = `the provider ${provider} does not work here: ${box.info.failedReason}`;
    });
    after(async () => {
      shard?.close();
      await host.close();
      rmSync(local, { recursive: true, force: true });
    });
    const it: Check = (name, work, timeout = 120_000) => {
      if (process.env["QUICK"] && !quick.includes(name)) return;
      test(name, { timeout }, async (t) => {
        if (broken !== undefined) return t.skip(broken);
        const reason = await work();
        if (typeof reason === "string") t.skip(reason);
      });
    };

    it("commands end as they end", async () => {
      const table: [string | string[], number, string][] = [
        ["echo hi", 0, "hi\n"],
        [["echo", "$HOME  *", ""], 0, "$HOME  * \n"],
        ["exit 3", 3, ""],
        ["kill -KILL $$", 137, ""],
        ["nosuch 2>/dev/null", 127, ""],
        ["exit 125", 125, ""],
      ];
      for (const [command, exitCode, stdout] of table) {
        const result = await box.exec(command);
        assert.deepEqual({ ...result, id: "" }, { id: "", exitCode, signal: null, stdout, stderr: "", lostBytes: 0 });
      }
      await assert.rejects(box.exec(["nosuch"]), (e) => e instanceof useshards.CommandNotStartedError && e.exitCode === 127 && e.reason !== "");
      await assert.rejects(box.exec(["/etc"]), (e) => e instanceof useshards.CommandNotStartedError && e.exitCode === 126);
      await assert.rejects(box.exec("pwd", { workdir: "/nosuch" }), (e) => e instanceof useshards.CommandNotStartedError && e.exitCode === 126);
    });

    it("environment, directory, user, terminal", async () => {
      const env = { A: "b=c\nd", B: "", ["ünï"]: "x" };
      assert.equal((await box.exec('echo "$A|$B|$FROM"', { env })).stdout, "b=c\nd||box\n");
      assert.equal((await box.exec("pwd; id -u", { workdir: "/tmp", user: "nobody" })).stdout, "/tmp\n65534\n");
      for (let i = 0; i < 5; i++) assert.equal((await box.exec(["stty", "size"], { tty: { rows: 40, cols: 120 } })).stdout, "40 120\r\n");
    });

    it("characters split over chunks", async () => {
      const text = "é😀ß".repeat(20);
      const octal = [...Buffer.from(text)].map((b) => `\\${b.toString(8).padStart(3, "0")}`);
      const chunks: Uint8Array[] = [];
      const slow = await box.exec(octal.slice(0, 40).map((o) => `printf '${o}'`).join("; "), { onStdout: (chunk) => chunks.push(chunk) });
      assert.equal(slow.stdout, Buffer.from(text).subarray(0, 40).toString());
      assert.equal(Buffer.concat(chunks).toString("hex"), Buffer.from(text).subarray(0, 40).toString("hex"));
      const blocks = await box.exec(["dd", "bs=8191"], { stdin: "😀".repeat(200_000) });
      assert.equal(blocks.stdout, "😀".repeat(200_000));
    });

    it("the newest bytes of both streams are kept, callbacks see all", async () => {
      const much = "dd if=/dev/zero bs=65536 count=320 2>/dev/null | tr '\\0' x";
      const last = await box.exec(`${much}; echo fatal >&2`);
      assert.equal(last.stderr, "fatal\n");
      assert.equal(last.stdout.length, 8 * MiB - 6);
      const first = await box.exec(`echo early >&2; sleep 0.5; ${much}`);
      assert.deepEqual([first.stderr, first.stdout.length, first.lostBytes], ["", 8 * MiB, 0]);
      for (const [limit, kept] of [[0, 0], [1, 1], [100 * MiB, 20 * MiB]] as const) {
        let seen = 0;
        const result = await box.exec(much, { outputLimitBytes: limit, onStdout: (chunk) => (seen += chunk.length) });
        assert.deepEqual([result.stdout.length, seen, result.lostBytes], [kept, 20 * MiB, 0]);
      }
    });

    it("input: whole, large, unread, and in the background", async () => {
      const result = await box.exec("cat; echo err >&2", { stdin: "hello\n" });
      assert.deepEqual([result.stdout, result.stderr], ["hello\n", "err\n"]);
      const large = "0123456789abcdef".repeat((4 * MiB) / 16);
      assert.ok((await box.exec(["cat"], { stdin: large })).stdout === large);
      assert.equal((await box.exec("exit 4", { stdin: large })).exitCode, 4);

      const cat = await box.exec(["cat"], { background: true, stdin: true });
      await cat.writeStdin("one\n");
      await cat.writeStdin(Buffer.from("two\n"));
      await cat.closeStdin();
      await cat.closeStdin();
      assert.equal((await cat.wait()).stdout, "one\ntwo\n");
    });

    it("in the background: leaving, finding again, replay", async () => {
      const command = await box.exec("echo one; read line; echo $line; sleep 0.2; exit 5", { background: true, stdin: true });
      assert.equal(command.sandboxId, box.id);
      assert.equal((await command.inspect()).state, "running");
      command.disconnect();
      await assert.rejects(command.writeStdin("x"), /reconnect/);
      const again = await box.commands.get(command.id);
      await assert.rejects(again.wait({ signal: AbortSignal.timeout(300) }), { name: "TimeoutError" });
      await again.reconnect();
      await again.writeStdin("two\n");
      const result = await again.wait();
      assert.deepEqual([result.exitCode, result.stdout], [5, "one\ntwo\n"]);
      assert.equal((await command.wait()).stdout, "one\ntwo\n"); // the first handle reads what is held
      assert.ok((await box.commands.list()).some((info) => info.id === command.id && info.exitCode === 5));
      await assert.rejects(command.kill(), (e) => e instanceof useshards.ConflictError && e.code === "exec_exited");
      await assert.rejects(box.commands.get("nosuch"), useshards.NotFoundError);
    });

    it("the guide: a bound on the time", async () => {
      const command = await box.exec(["sleep", "600"], { background: true });
      const deadline = AbortSignal.timeout(300);
      let result;
      try {
        result = await command.wait({ signal: deadline });
      } catch (error) {
        if (!deadline.aborted) throw error;
        await command.kill("KILL");
        result = await command.wait();
      }
      assert.equal(result.exitCode, 137);
    });

    it("a terminal hears of its new size", async () => {
      const command = await box.exec("trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.1; done", { background: true, tty: { rows: 10, cols: 20 } });
      let text = "";
      const found = await box.commands.get(command.id, { onStdout: (chunk) => (text += Buffer.from(chunk).toString()) });
      command.disconnect();
      await found.reconnect();
      while (!text.includes("ready")) await new Promise((r) => setTimeout(r, 20));
      await found.resize(50, 200);
      assert.match((await found.wait()).stdout, /50 200/);
    });

    it("many at once, and many that are left at any moment", async () => {
      const results = await Promise.all(Array.from({ length: 24 }, (_, i) => box.exec(`echo ${i}`)));
      assert.deepEqual(results.map((r) => r.stdout), Array.from({ length: 24 }, (_, i) => `${i}\n`));
      const idle = connections();
      let left = 0;
      for (let round = 0; round < 8; round++) {
        await Promise.all(
          Array.from({ length: 12 }, async (_, i) => {
            const signal = AbortSignal.timeout(1 + ((round * 12 + i) * 7) % 90);
            try {
              if (i % 3 === 0) await box.files.read("/bin/busybox", { signal });
              else if (i % 3 === 1) await box.exec("echo x; sleep 0.05", { signal });
              else await (await box.exec("sleep 0.05", { background: true, signal })).wait({ signal });
            } catch (error) {
              if (error instanceof useshards.APIError && error.code === "exec_limit") return;
              assert.equal((error as Error).name, "TimeoutError", String((error as Error).stack));
              left++;
            }
          }),
        );
      }
      assert.ok(left > 20, `${left} were left`);
      for (let i = 0; i < 30; i++) assert.equal((await box.exec("echo fine")).stdout, "fine\n");
      // Background commands whose wait was left stay attached until they end.
      for (let i = 0; i < 300 && connections() > idle; i++) await new Promise((r) => setTimeout(r, 20));
      assert.ok(connections() <= idle, `${connections()} connections, ${idle} before`);
    });

    it("files one by one", async () => {
      const { files } = box;
      await files.mkdir("/root/f/g", { parents: true, mode: 0o700 });
      await files.write("/root/f/né 😀", "tëxt", { mode: 0o640 });
      assert.equal(await files.read("/root/f/né 😀", { encoding: "utf8" }), "tëxt");
      assert.deepEqual(await files.read("/root/f/né 😀"), new Uint8Array(Buffer.from("tëxt")));
      const stat = await files.stat("/root/f/né 😀");
      assert.deepEqual([stat.type, stat.size, stat.mode, stat.uid], ["file", 5, 0o640, 0]);
      assert.ok(Math.abs(stat.mtime.getTime() - Date.now()) < 60_000);
      assert.deepEqual((await files.list("/root/f")).map((e) => [e.name, e.type]), [["g", "dir"], ["né 😀", "file"]]);
      await files.write("/tmp/nobody's", "x", { user: "nobody" });
      assert.equal((await files.stat("/tmp/nobody's")).uid, 65534);
      await assert.rejects(files.write("/nosuch/x", ""), useshards.NotFoundError);
      await assert.rejects(files.write("/nosuch/x", Buffer.alloc(8 * MiB)), useshards.NotFoundError);
      await assert.rejects(files.read("/nosuch"), useshards.NotFoundError);
      await assert.rejects(files.stat("/nosuch"), useshards.NotFoundError);
      await assert.rejects(files.read("/root/f"), useshards.InvalidRequestError);
      await assert.rejects(files.mkdir("/root/f"), useshards.InvalidRequestError);
      await assert.rejects(files.remove("/root/f"), useshards.InvalidRequestError);
      await files.remove("/root/f", { recursive: true });
      await assert.rejects(files.list("/root/f"), useshards.NotFoundError);
    });

    it("a large file goes through without being held, and sparse", async () => {
      const size = 384 * MiB;
      const source = join(local, "large");
      const fd = openSync(source, "w", 0o600);
      ftruncateSync(fd, size);
      for (let at = 0; at < size; at += 16 * MiB) writeSync(fd, `at ${at}`, at);
      closeSync(fd);
      let most = 0;
      const watch = setInterval(() => (most = Math.max(most, process.memoryUsage().rss)), 20);
      const before = process.memoryUsage().rss;
      await box.files.upload(source, "/root/large");
      await box.files.download("/root/large", join(local, "back"));
      clearInterval(watch);
      assert.ok(most - before < 200 * MiB, `${Math.round((most - before) / MiB)} MiB more`);
      assert.ok(readFileSync(source).equals(readFileSync(join(local, "back"))));
      assert.equal(statSync(join(local, "back")).mode & 0o777, 0o600);
      await box.files.remove("/root/large");
    });

    it("trees in and out", async () => {
      const tree = join(local, "tree");
      mkdirSync(join(tree, "empty"), { recursive: true });
      mkdirSync(join(tree, "d".repeat(120)), { mode: 0o750 });
      writeFileSync(join(tree, "a"), "a", { mode: 0o640 });
      linkSync(join(tree, "a"), join(tree, "hard"));
      symlinkSync("a", join(tree, "soft"));
      writeFileSync(join(tree, "d".repeat(120), "né 😀"), "x".repeat(70_000));
      await box.files.uploadDir(tree, "/root/tree", { user: "nobody" }).catch((e: unknown) => assert.ok(e instanceof useshards.APIError)); // nobody may not
      await box.files.uploadDir(tree, "/root/tree");
      assert.equal((await box.exec("cat /root/tree/hard; stat -c '%i' /root/tree/a /root/tree/hard | uniq | wc -l")).stdout, "a1\n");
      await box.exec("cd /root/tree && ln -s ../tree/a up && chmod 4755 a");
      await assert.rejects(box.files.downloadDir("/root/tree", join(local, "no")), useshards.UnsafeArchiveError);
      assert.throws(() => lstatSync(join(local, "no")), { code: "ENOENT" });
      await box.exec("rm /root/tree/up");
      await box.files.downloadDir("/root/tree", join(local, "out"));
      assert.deepEqual(readdirSync(join(local, "out")).sort(), readdirSync(tree).sort());
      assert.equal(lstatSync(join(local, "out", "a")).mode & 0o7777, 0o755);
      assert.equal(lstatSync(join(local, "out", "a")).ino, lstatSync(join(local, "out", "hard")).ino);
      assert.equal(readFileSync(join(local, "out", "d".repeat(120), "né 😀"), "utf8"), "x".repeat(70_000));
      await assert.rejects(box.files.downloadDir("/etc/passwd", join(local, "no")), { code: "ENOTDIR" });
      await assert.rejects(box.files.downloadDir("/nosuch", join(local, "no")), useshards.NotFoundError);
      await assert.rejects(box.files.uploadDir(join(local, "nosuch"), "/root/x"), { code: "ENOENT" });
    });

    it("sandboxes: names, lists, stop, start, remove", async () => {
      await using other = await shard.create({ image, name: "other", workdir: "/tmp", vcpus: 1, diskMiB: 2048 });
      assert.deepEqual([other.name, other.info.resources.diskMiB, other.info.egress], ["other", 2048, null]);
      await assert.rejects(shard.create({ image, name: "other" }), (e) => e instanceof useshards.ConflictError && e.code === "name_taken");
      assert.equal((await shard.get("other")).id, other.id);
      assert.equal((await shard.get(other.id.slice(0, -2))).id, other.id);
      await other.files.write("/root/kept", "kept");
      await other.stop();
      assert.equal(other.info.state, "stopped");
      await assert.rejects(other.exec("true"), (e) => e instanceof useshards.ConflictError && e.code === "sandbox_not_running");
      assert.ok(!(await shard.list()).sandboxes.some((s) => s.id === other.id));
      assert.deepEqual((await shard.list({ all: true })).warnings, []);
      assert.ok((await shard.list({ all: true })).sandboxes.some((s) => s.id === other.id));
      await other.start();
      assert.equal(await other.files.read("/root/kept", { encoding: "utf8" }), "kept");
      await assert.rejects(other.remove(), (e) => e instanceof useshards.ConflictError && e.code === "sandbox_not_stopped");
      await other.remove({ force: true });
      await assert.rejects(shard.get("other"), useshards.NotFoundError);
      await assert.rejects(shard.get(".."), useshards.APIError);
      await assert.rejects(shard.create({ image: "NOT AN IMAGE" }), useshards.InvalidRequestError);
    });

    it("keys", async () => {
      const wrong = new Shard({ ...credentials(), apiKey: "wrong" });
      await assert.rejects(wrong.list(), useshards.AuthenticationError);
      await assert.rejects(wrong.get(box.id), useshards.AuthenticationError);
      wrong.close();
      const apiKey = JSON.parse(host.cli("tokens", "mint", "--name", "reader", "--scopes", "sandbox:read")).token;
      const reader = new Shard({ ...credentials(), apiKey });
      assert.equal((await reader.get(box.id)).id, box.id);
      await assert.rejects((await reader.get(box.id)).exec("true"), useshards.PermissionDeniedError);
      await assert.rejects((await reader.get(box.id)).files.write("/root/x", Buffer.alloc(8 * MiB)), useshards.PermissionDeniedError);
      reader.close();
      const untrusting = new Shard({ remote: host.remote, apiKey: host.apiKey });
      await assert.rejects(untrusting.version(), (e) => e instanceof useshards.ShardConnectionError && /trust/.test(e.message));
      untrusting.close();
    });

    it("watching a directory", async () => {
      await box.files.mkdir("/root/watched/d", { parents: true });
      const changes = await box.files.watch("/root/watched").open();
      const seen: string[] = [];
      await box.exec("cd /root/watched; echo 1 > a; mv a d/b; rm -r d; rmdir ../watched");
      for await (const event of changes) {
        assert.ok(event.path.startsWith("/root/watched") && Math.abs(event.time.getTime() - Date.now()) < 60_000);
        if (event.type !== "modified") seen.push(`${event.type} ${event.path}${event.movedFrom === null ? "" : ` from ${event.movedFrom}`}${event.isDir ? "/" : ""}`);
      }
      assert.deepEqual(seen, [
        "created /root/watched/a",
        "moved /root/watched/d/b from /root/watched/a",
        "deleted /root/watched/d/b",
        "deleted /root/watched/d/",
        "deleted /root/watched/",
      ]);
      await assert.rejects(box.files.watch("/nosuch").open(), useshards.NotFoundError);
      await assert.rejects(box.files.watch("/etc/passwd").next(), useshards.InvalidRequestError);
    });

    it("providers", async () => {
      const providers = await shard.providers();
      const own = providers.find((p) => p.name === provider);
      assert.ok(own?.available === true && own.capabilities.create, JSON.stringify(providers));
      assert.equal(providers.filter((p) => p.default).length, 1);
      await using named = await shard.create({ image, provider });
      assert.equal(named.info.provider, provider);
      await assert.rejects(shard.create({ image, provider: "nosuch" }), useshards.APIError);
    });

    it("named processes", async () => {
      const ticker = await box.run("for i in 1 2 3; do echo tick $i; done", { name: "ticker", restart: { policy: "no" } });
      const info = await ticker.wait({ signal: AbortSignal.timeout(30_000) });
      assert.deepEqual([info.status.exit?.code, info.status.state], [0, "exited"]);
      assert.equal(await ticker.logs(), "tick 1\ntick 2\ntick 3\n");
      let followed = "";
      for await (const chunk of ticker.followLogs()) followed += Buffer.from(chunk).toString();
      assert.equal(followed, "tick 1\ntick 2\ntick 3\n");
      const server = await box.run(["sh", "-c", "echo up; exec sleep 1000"], { name: "server" });
      await assert.rejects(box.run(["true"], { name: "server" }), (e) => e instanceof useshards.ConflictError && e.code === "name_taken");
      const logs = server.followLogs();
      assert.equal(Buffer.from((await logs.next()).value as Uint8Array).toString(), "up\n");
      await assert.rejects(server.wait({ signal: AbortSignal.timeout(200) }), { name: "TimeoutError" });
      assert.equal((await server.inspect()).status.state, "running");
      await (await box.processes.get("server")).kill({ force: true });
      assert.equal((await logs.next()).done, true);
      assert.equal((await server.wait()).killed, true);
      assert.deepEqual((await box.processes.list()).map((p) => p.name), ["ticker", "server"]);
      await assert.rejects(box.processes.get("nosuch"), (e) => e instanceof useshards.NotFoundError && e.code === "no_process");
    });

    it("pause and resume", async () => {
      if (!(await shard.capabilities()).pause) {
        await assert.rejects(box.pause(), useshards.UnsupportedError);
        await assert.rejects(box.resume(), useshards.UnsupportedError);
        assert.equal((await box.inspect()).state, "running");
        return;
      }
      const paused = await shard.create({ image });
      try {
        const conflict = (code: string) => (e: unknown) => e instanceof useshards.ConflictError && e.code === code;
        const counter = await paused.run("n=0; while :; do n=$((n + 1)); echo $n; sleep 0.02; done", { name: "counter" });
        const follow = counter.followLogs();
        const seen = [Buffer.from((await follow.next()).value ?? "")];
        const command = await paused.exec("echo held; sleep 1000", { background: true });
        const { startedAt } = paused.info;
        await paused.pause();
        assert.deepEqual([paused.info.state, paused.info.startedAt], ["paused", startedAt]);
        await assert.rejects(command.wait(), (e) => conflict("sandbox_not_running")(e) && /the sandbox was paused while the command ran/.test(String(e)));
        await assert.rejects(paused.exec("true"), conflict("sandbox_not_running"));
        await assert.rejects(paused.pause(), conflict("sandbox_not_running"));
        await assert.rejects(paused.start(), conflict("sandbox_not_stopped"));
        await assert.rejects(paused.remove(), conflict("sandbox_not_stopped"));
        const counted = async (): Promise<number> => (await counter.logs()).split("\n").length;
        const before = await counted();
        await paused.resume();
        assert.deepEqual([paused.info.state, paused.info.startedAt], ["running", startedAt]);
        await assert.rejects(paused.resume(), conflict("sandbox_not_paused"));
        assert.equal((await paused.exec("echo on")).stdout, "on\n");
        while ((await counted()) <= before) await new Promise((resolve) => setTimeout(resolve, 20));
        const { status } = await counter.inspect();
        assert.deepEqual([status.state, status.restarts], ["running", 0]);
        await counter.kill({ force: true });
        const lines = (await counter.logs()).trimEnd().split("\n");
        assert.deepEqual(lines, lines.map((_, i) => String(i + 1)));
        for await (const chunk of follow) seen.push(Buffer.from(chunk));
        assert.equal(Buffer.concat(seen).toString(), await counter.logs());
        await paused.pause(); // and one that is paused can be removed by force
      } finally {
        await paused.remove({ force: true });
      }
    });

    it("ports", async () => {
      if (!(await shard.capabilities()).port) return "this provider forwards no ports";
      await box.run("while :; do echo hello | nc -l -p 8000; done", { name: "greeter" });
      const port = await box.ports.add(20_000 + (process.pid % 10_000), 8000);
      assert.deepEqual([port.guestPort, port.listening, port.public], [8000, true, false]);
      let said = "";
      for (let i = 0; i < 200 && said === ""; i++) {
        said = await new Promise<string>((resolve) => {
          let text = "";
          connect(port.hostPort, "127.0.0.1").on("data", (chunk) => (text += chunk.toString())).on("error", () => undefined).on("close", () => resolve(text));
        });
        if (said === "") await new Promise((r) => setTimeout(r, 50));
      }
      assert.equal(said, "hello\n");
      assert.deepEqual((await box.ports.list()).map((p) => p.hostPort), [port.hostPort]);
      assert.ok((await shard.ports()).some((p) => p.hostPort === port.hostPort && p.sandbox === box.id));
      await assert.rejects(shard.create({ image, ports: [{ hostPort: port.hostPort, guestPort: 8000 }] }), useshards.ConflictError);
      await box.ports.remove(port.hostPort);
      assert.deepEqual(await box.ports.list(), []);
      return undefined;
    });

    it("policies and the egress log", async () => {
      const rules = [{ action: "deny", rule: "blocked.example" }, { action: "allow", rule: "192.0.2.0/24 tcp:443" }];
      const policy = await shard.policies.set("narrow", rules);
      assert.deepEqual(policy.rules, rules);
      await using narrow = await shard.create({ image, policy: "narrow" });
      assert.equal(narrow.info.policy, "narrow");
      assert.deepEqual((await shard.policies.get("narrow")).holders, [narrow.id]);
      assert.ok((await shard.policies.list()).some((p) => p.name === "narrow"));
      await assert.rejects(shard.policies.remove("narrow"), (e) => e instanceof useshards.ConflictError && e.code === "in_use" && e.holders.length === 1);
      const follow = narrow.followEgressLog();
      const first = follow.next();
      await narrow.exec("nslookup blocked.example; true");
      const { value: decision } = await first;
      assert.deepEqual([decision?.source, decision?.verdict], ["dns", "deny"]);
      assert.match(String(decision?.host), /blocked\.example/);
      assert.ok((await narrow.egressLog()).some((d) => d.verdict === "deny"));
      await narrow.stop();
      for await (const _ of follow);
      assert.equal((await shard.policies.detach(narrow)).policy, null);
      assert.equal((await shard.policies.attach(narrow, "narrow")).policy, "narrow");
      await shard.policies.detach(narrow);
      await shard.policies.remove("narrow");
      await assert.rejects(shard.policies.get("narrow"), useshards.NotFoundError);
      await assert.rejects(shard.policies.set("narrow", [{ action: "deny", rule: "no rule at all" }]), useshards.InvalidRequestError);
    });

    it("secrets", async () => {
      const { secrets } = shard;
      const value = "the-real-value-of-the-token";
      const code = (want: string) => (e: unknown) => e instanceof useshards.ConflictError && e.code === want;
      await assert.rejects(secrets.set("API_TOKEN", { value }), useshards.InvalidRequestError); // the first time it needs destinations
      const stored = await secrets.set("API_TOKEN", { value, destinations: ["api.example.com", "*.example.net"] });
      let held: Sandbox | undefined;
      try {
        assert.deepEqual([stored.name, stored.placeholder], ["API_TOKEN", "mock-API_TOKEN"]);
        assert.deepEqual([...stored.destinations].sort(), ["*.example.net", "api.example.com"]);
        const again = await secrets.set("API_TOKEN", { value: `${value}-2` });
        assert.deepEqual([again.destinations, again.placeholder], [stored.destinations, stored.placeholder]);
        for (const [name, options] of [
          ["lower-case", { value, destinations: ["a.example.com"] }],
          ["OTHER", { value, destinations: ["*"] }],
          ["OTHER", { value: "", destinations: ["a.example.com"] }],
          ["OTHER", { value, destinations: ["a.example.com"], placeholder: "short" }],
          ["OTHER", { value, destinations: ["a.example.com"], placeholder: "mock-API_TOKEN" }],
        ] as const) {
          await assert.rejects(secrets.set(name, { ...options, destinations: [...options.destinations] }), (e) => e instanceof useshards.APIError && [400, 409].includes(e.status) && !String(e).includes(value));
        }
        const found = await secrets.list();
        assert.deepEqual([[...found].map((s) => s.name), found.warnings], [["API_TOKEN"], []]);
        assert.ok(!JSON.stringify(found).includes(value));

        await assert.rejects(shard.create({ image, secrets: ["NO_SUCH"] }), useshards.InvalidRequestError);
        await assert.rejects(shard.create({ image, secrets: ["API_TOKEN"], env: { API_TOKEN: "mine" } }), useshards.InvalidRequestError);
        held = await shard.create({ image, secrets: ["API_TOKEN"] });
        assert.deepEqual([held.info.state, held.info.secrets], ["running", ["API_TOKEN"]]);
        const { stdout } = await held.exec("echo $API_TOKEN; env; cat $SSL_CERT_FILE");
        assert.ok(stdout.startsWith("mock-API_TOKEN\n") && stdout.includes("BEGIN CERTIFICATE") && !stdout.includes(value));

        await assert.rejects(secrets.set("API_TOKEN", { value, placeholder: "another-placeholder" }), code("in_use"));
        const { id } = held;
        await assert.rejects(secrets.remove("API_TOKEN"), (e) => code("in_use")(e) && assert.deepEqual((e as useshards.APIError).holders, [id]) === undefined);
        await assert.rejects(secrets.ungrant(held, "API_TOKEN"), code("sandbox_live"));
        await assert.rejects(secrets.grant(held, "API_TOKEN"), code("sandbox_live"));
        await held.stop();
        assert.deepEqual((await secrets.ungrant(held, "API_TOKEN")).secrets, []);
        for (let i = 0; i < 2; i++) assert.deepEqual((await secrets.grant(id, "API_TOKEN")).secrets, ["API_TOKEN"]);
        await assert.rejects(secrets.grant(held, "NO_SUCH"), useshards.NotFoundError);
        await held.start();
        assert.equal((await held.exec("echo $API_TOKEN")).stdout, "mock-API_TOKEN\n");
        await secrets.remove("API_TOKEN", { force: true });
        assert.deepEqual((await secrets.list()).secrets, []);
        await assert.rejects(secrets.remove("API_TOKEN"), useshards.NotFoundError);
      } finally {
        await held?.remove({ force: true });
        if ((await secrets.list()).secrets.length > 0) await secrets.remove("API_TOKEN", { force: true });
      }
    });

    it("what the provider can do besides", async () => {
      const capabilities = await shard.capabilities();
      if (!capabilities.fork) await assert.rejects(box.fork(), useshards.APIError);
      assert.equal((await shard.version()).apiVersion, "v0");
    });

    heavy(it, local, () => box, connections);

    // Last, since it stops the server.
    it("a server that stops answering ends a wait, and a command goes on", async () => {
      const beat = bounds.beat;
      bounds.beat = 200;
      const command = await box.exec("sleep 3; echo done", { background: true });
      try {
        host.server.kill("SIGSTOP");
        await assert.rejects(command.wait(), useshards.ShardConnectionError);
      } finally {
        host.server.kill("SIGCONT");
        bounds.beat = beat;
      }
      assert.equal((await command.wait()).stdout, "done\n");
    });

    function credentials(): { remote: string; caFile: string } {
      return { remote: host.remote, caFile: host.caFile };
    }
  });
}
