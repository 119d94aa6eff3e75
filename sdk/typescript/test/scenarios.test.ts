// Every scenario of ../../../conformance/scenarios, against a scripted server.

import assert from "node:assert/strict";
import { chmodSync, mkdtempSync, readFileSync, readdirSync, rmSync, statSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import * as useshards from "useshards";
import { bounds } from "../dist/transport.js";
import { Scripted, value, type Cut } from "./scripted.js";

type Json = any;

const scenarios = new URL("../../../conformance/scenarios/", import.meta.url);
const box = JSON.parse(readFileSync(new URL("box.json", scenarios), "utf8"));
process.removeAllListeners("warning"); // that the remote is http

const camel = (name: string): string => name.replace(/_mib$/, "MiB").replace(/_([a-z])/g, (_, c: string) => c.toUpperCase());

/** Runs the calls of a scenario. A failure of the last one is returned when the server cuts. */
async function play(scenario: Json, cut?: Cut): Promise<unknown> {
  const server = new Scripted(scenario, box, cut);
  const remote = await server.listen();
  const local = mkdtempSync(join(tmpdir(), "useshards-"));
  const shard = new useshards.Shard({ remote, apiKey: "test-key" });
  const collected: Record<string, Buffer[]> = {};
  const handles: Record<string, any> = { shard };
  const standard = bounds.request;
  if (scenario.timeout !== undefined) bounds.request = scenario.timeout * 1000;
  const context: Record<string, (arg: Json) => unknown> = {
    $local: (name) => join(local, name),
    $sandbox: () => handles["sandbox"],
    $size: ([rows, cols]) => ({ rows, cols }),
    $restart: ([policy, retries, backoff]) => ({ policy, retries, backoff }),
    $port: ([hostPort, guestPort, isPublic]) => ({ hostPort, guestPort, public: isPublic }),
    $rule: ([action, rule]) => ({ action, rule }),
    $collect: (name) => (chunk: Uint8Array) => void (collected[name] ??= []).push(Buffer.from(chunk)),
  };
  try {
    handles["sandbox"] = await shard.get(box.id);
    for (const call of scenario.calls) {
      const args = (value(call.args ?? [], context) as unknown[]).slice();
      const options = Object.fromEntries(
        Object.entries(call.options ?? {}).map(([k, v]) => [camel(k), value(v, context)]),
      ) as Record<string, unknown>;
      const raises = call.raises;
      let outcome: unknown;
      try {
        outcome = await invoke(handles, local, call.call, args, options);
      } catch (error) {
        if (cut !== undefined) return error;
        if (raises === undefined) throw error;
        expectError(error, raises);
        continue;
      }
      assert.equal(raises, undefined, `${call.call} did not throw`);
      if (call.as) handles[call.as] = outcome;
      if ("returns" in call && call.returns !== null) compare(outcome, value(call.returns, context), call.call);
      for (const [name, hex] of Object.entries(call.callbacks ?? {})) assert.equal(Buffer.concat(collected[name]!).toString("hex"), hex);
    }
    return undefined;
  } finally {
    bounds.request = standard;
    shard.close();
    const held = await server.close();
    rmSync(local, { recursive: true });
    if (cut === undefined) {
      assert.deepEqual(server.faults, []);
      assert.deepEqual(server.unasked(), [], "not asked for");
    }
    assert.equal(held, 0, "connections that the client held after close()");
  }
}

async function invoke(handles: Record<string, any>, local: string, name: string, args: any[], options: Record<string, unknown>): Promise<unknown> {
  if (name === "local.write") {
    writeFileSync(join(local, args[0]), args[1]);
    chmodSync(join(local, args[0]), parseInt(options["mode"] as string, 8));
    return undefined;
  }
  if (name === "local.read") {
    const path = join(local, args[0]);
    return { text: readFileSync(path, "utf8"), mode: (statSync(path).mode & 0o7777).toString(8).padStart(4, "0") };
  }
  if (name === "local.list") return readdirSync(local);
  const path = name.split(".");
  let method = camel(path.pop()!);
  const on = path.reduce((object, part) => object[part], handles as any);
  if (method === "info") return on.info;
  if ("timeout" in options) {
    options["signal"] = AbortSignal.timeout((options["timeout"] as number) * 1000);
    delete options["timeout"];
  }
  if (method === "create" && name === "shard.create" && args.length > 0) options["image"] = args.shift();
  if (method === "readText") {
    method = "read";
    options["encoding"] = "utf8";
  }
  if (Object.keys(options).length > 0) args.push(options);
  const result = on[method](...args);
  if (typeof result?.[Symbol.asyncIterator] !== "function") return result;
  const items: any[] = [];
  for await (const item of result) items.push(item);
  return items.length > 0 && items.every((item) => item instanceof Uint8Array) ? Buffer.concat(items) : items;
}

function compare(got: any, want: any, where: string): void {
  if (got instanceof Date) assert.equal(got.getTime(), new Date(want).getTime(), where);
  else if (want instanceof Uint8Array) assert.equal(Buffer.from(got).toString("hex"), Buffer.from(want).toString("hex"), where);
  else if (Array.isArray(want)) {
    assert.equal(got.length, want.length, where);
    want.forEach((item, i) => compare(got[i], item, `${where}[${i}]`));
  } else if (typeof want === "object" && want !== null) {
    for (const [key, item] of Object.entries(want)) compare(got[camel(key)], item, `${where}.${key}`);
  } else assert.equal(got, want, where);
}

const natives: Record<string, (error: any) => boolean> = {
  value: (e) => e instanceof RangeError || e instanceof TypeError,
  type: (e) => e instanceof TypeError,
  timeout: (e) => e.name === "TimeoutError",
  not_found: (e) => e.code === "ENOENT",
  not_a_directory: (e) => e.code === "ENOTDIR",
};

function expectError(error: any, want: Json): void {
  if ("native" in want) {
    assert.ok(natives[want.native]!(error), String(error));
    return;
  }
  assert.equal(error.constructor.name, want.class, String(error?.stack));
  for (const key of ["status", "code", "reason"]) if (key in want) assert.equal(error[key], want[key]);
  if ("exit_code" in want) assert.equal(error.exitCode, want.exit_code);
  for (const part of want.says ?? []) assert.ok(error.message.includes(part), `${error.message} does not say ${part}`);
}

for (const file of readdirSync(scenarios).filter((name) => name.endsWith(".json") && name !== "box.json")) {
  for (const scenario of JSON.parse(readFileSync(new URL(file, scenarios), "utf8")).scenarios) {
    if (scenario.only !== undefined && !scenario.only.includes("typescript")) continue;
    test(`${file}: ${scenario.about}`, { timeout: 30_000 }, async () => {
      await play(scenario);
    });
    if (scenario.cut === undefined) continue;
    // The answer to each exchange is cut after each of its bytes: the call fails, or has the whole result.
    test(`${file}: cut anywhere: ${scenario.about}`, { timeout: 120_000 }, async () => {
      for (let exchange = 0; exchange < scenario.exchanges.length; exchange++) {
        if (scenario.exchanges[exchange].always) continue;
        const at = async (after: number): Promise<boolean> => {
          const cut: Cut = { exchange, after };
          const error: any = await play(scenario, cut);
          if (cut.took === true && error !== undefined) assert.equal(error.name, scenario.cut.raises, `after ${after} bytes: ${error.message}`);
          return cut.took === true;
        };
        const together = 16;
        for (let after = 0; ; after += together) {
          const took = await Promise.all(Array.from({ length: together }, (_, i) => at(after + i)));
          if (took.includes(false)) break;
        }
      }
    });
  }
}
