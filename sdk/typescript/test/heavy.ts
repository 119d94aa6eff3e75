// What takes minutes or gigabytes, against a real server; not with QUICK.

import assert from "node:assert/strict";
import { closeSync, createReadStream, openSync, readSync, rmSync, statSync, truncateSync, writeSync } from "node:fs";
import { join } from "node:path";
import { APIError, type Sandbox } from "useshards";

const MiB = 1 << 20;

/** A check of the live suite: its name, what it does, and its bound in ms. */
export type Check = (name: string, work: () => Promise<string | undefined | void>, timeout?: number) => void;

export function heavy(it: Check, local: string, sandbox: () => Sandbox, connections: () => number): void {
  it("gigabytes in flat memory", async () => {
    const [source, back] = [join(local, "source"), join(local, "back")];
    const size = 3 * 1024 * MiB + 1;
    const file = openSync(source, "w");
    truncateSync(source, size);
    for (const at of [0, 1024 * MiB, size - 5]) writeSync(file, "mark!", at);
    closeSync(file);
    try {
      // Memory of both: what the test itself holds does not grow on the way.
      await flat("upload 3 GiB", size, () => sandbox().files.upload(source, "/root/large"));
      assert.equal((await sandbox().files.stat("/root/large")).size, size);
      await flat("download 3 GiB", size, () => sandbox().files.download("/root/large", back));
      assert.equal(statSync(back).size, size);
      const copy = openSync(back, "r");
      for (const at of [0, 1024 * MiB, size - 5]) {
        const mark = Buffer.alloc(5);
        readSync(copy, mark, 0, 5, at);
        assert.equal(mark.toString(), "mark!", `at ${at}`);
      }
      closeSync(copy);
      for await (const chunk of createReadStream(back, { start: MiB, end: 2 * MiB })) assert.ok((chunk as Buffer).every((b) => b === 0));
    } finally {
      rmSync(source, { force: true });
      rmSync(back, { force: true });
      await sandbox().files.remove("/root/large").catch(() => undefined);
    }
  }, 1_200_000);

  it("a thousand that are left", async () => {
    const box = sandbox();
    for (let i = 0; i < 10; i++) await box.exec(["true"]);
    const [idle, before] = [connections(), process.memoryUsage().rss];
    let left = 0;
    for (let round = 0; round < 100; round++) {
      await Promise.all(
        Array.from({ length: 10 }, async (_, i) => {
          const signal = AbortSignal.timeout(1 + (((round * 10 + i) * 7) % 60));
          try {
            if (i % 5 === 0) await box.files.read("/bin/busybox", { signal });
            else if (i % 5 === 1) await box.exec("echo x; sleep 0.05", { signal });
            else if (i % 5 === 2) await (await box.exec("sleep 0.05", { background: true, signal })).wait({ signal });
            else if (i % 5 === 3) for await (const _ of box.followEgressLog({ signal })) continue;
            else for (;;) await box.commands.list({ signal });
          } catch (error) {
            if (error instanceof APIError && error.code === "exec_limit") return;
            assert.equal((error as Error).name, "TimeoutError", String((error as Error).stack));
            left++;
          }
        }),
      );
    }
    assert.ok(left > 500, `${left} were left`);
    for (let i = 0; i < 100; i++) assert.equal((await box.exec("echo fine")).stdout, "fine\n");
    // Background commands whose wait was left stay attached until they end.
    for (let i = 0; i < 3000 && connections() > idle; i++) await new Promise((r) => setTimeout(r, 20));
    assert.ok(connections() <= idle, `${connections()} connections, ${idle} before`);
    console.log(`# left ${left} of 1000; ${Math.round((process.memoryUsage().rss - before) / MiB)} MiB more than before`);
  }, 600_000);
}

/** Does something large, and fails when memory grows by 200 MiB meanwhile. */
async function flat(what: string, size: number, work: () => Promise<void>): Promise<void> {
  const before = process.memoryUsage().rss;
  let peak = before;
  const watch = setInterval(() => (peak = Math.max(peak, process.memoryUsage().rss)), 20);
  const begin = performance.now();
  try {
    await work();
  } finally {
    clearInterval(watch);
  }
  console.log(`# ${what}: ${Math.round(size / 1e3 / (performance.now() - begin))} MB/s, ${Math.round((peak - before) / MiB)} MiB of memory`);
  assert.ok(peak - before < 200 * MiB, `memory grew by ${peak - before} bytes`);
}
