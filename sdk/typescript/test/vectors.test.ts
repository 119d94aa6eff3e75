// The vectors that every client of this API must agree on: ../../../conformance.

import assert from "node:assert/strict";
import { lstatSync, mkdirSync, mkdtempSync, readFileSync, readdirSync, readlinkSync, rmSync, writeFileSync } from "node:fs";
import { open } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import * as useshards from "useshards";
import { detailError, errorObject, refusal } from "../dist/errors.js";
import { argv, environment, octal, portForward } from "../dist/inputs.js";
import * as models from "../dist/models.js";
import { Fields } from "../dist/records.js";
import { resolve } from "../dist/settings.js";
import { route } from "../dist/transport.js";
import { unpack } from "../dist/unpack.js";
import { Decoder, acceptOf, encode } from "../dist/websocket.js";

const conformance = new URL("../../../conformance/", import.meta.url);
const load = (name: string): any => JSON.parse(readFileSync(new URL(name, conformance), "utf8"));

/** Bytes as pieces: hex, or [hex, count] for a repetition. */
function unpacked(pieces: (string | [string, number])[]): Buffer {
  return Buffer.concat(
    pieces.map((p) => (typeof p === "string" ? Buffer.from(p, "hex") : Buffer.concat(Array<Buffer>(p[1]).fill(Buffer.from(p[0], "hex"))))),
  );
}

/** A field's name as this SDK writes it. */
const camel = (name: string): string => name.replace(/_mib\b/, "MiB").replace(/_([a-z])/g, (_, c: string) => c.toUpperCase());

function expect(error: unknown, want: Record<string, any>): void {
  assert.ok(error instanceof useshards.ShardError);
  assert.equal(error.constructor.name, want["class"]);
  assert.equal(error.name, want["class"]);
  if ("text" in want && want["body"] !== undefined) assert.equal(error.message, want["text"]);
  if (error instanceof useshards.APIError) {
    if ("code" in want) assert.equal(error.code, want["code"]);
    if ("status" in want) assert.equal(error.status, want["status"]);
    assert.deepEqual(error.holders, want["holders"] ?? []);
    if ("says" in want) assert.match(error.message, new RegExp(want["says"].replace(/[<>/]/g, ".")));
  }
  if (error instanceof useshards.CommandNotStartedError) {
    assert.equal(error.exitCode, want["exit_code"]);
    if ("reason" in want) assert.equal(error.reason, want["reason"]);
  }
}

test("errors", () => {
  const vectors = load("errors.json");
  for (const v of vectors.answers) {
    const body = Buffer.from(v.body === undefined ? v.text : JSON.stringify(v.body));
    expect(refusal(v.status, body, false), v);
  }
  const { status, unit, count, quotes } = vectors.quoted;
  const long = refusal(status, Buffer.from(unit.repeat(count)), false);
  assert.equal(long.message.split(unit).length - 1, quotes);
  for (const v of vectors.heads) expect(refusal(v.status, Buffer.alloc(0), true), { ...v, code: "" });
  for (const v of vectors.streams) expect(detailError(undefined, errorObject(v.body)!), v);
});

test("frames", () => {
  const vectors = load("frames.json");
  const decode = (data: Buffer, step: number): { opcode: number; data: Buffer }[] => {
    const decoder = new Decoder();
    const messages = [];
    for (let at = 0; at < data.length; at += step) {
      decoder.feed(data.subarray(at, at + step));
      for (let m = decoder.next(); m !== undefined; m = decoder.next()) messages.push(m);
    }
    return messages;
  };
  for (const v of vectors.received) {
    const data = unpacked(v.bytes);
    for (const step of data.length < 1000 ? [1, 2, 3, data.length] : [1000, data.length]) {
      const want = v.messages.map((m: any) => ({ opcode: m.opcode, data: unpacked(m.payload).toString("hex") }));
      const got = decode(data, step).map((m) => ({ opcode: m.opcode, data: m.data.toString("hex") }));
      assert.deepEqual(got, want, `${v.about}, ${step} bytes at a time`);
    }
  }
  for (const v of vectors.refused) {
    assert.throws(() => decode(unpacked(v.bytes), 1 << 20), useshards.ProtocolError, v.about);
  }
  for (const v of vectors.sent) {
    const payload = unpacked(v.payload);
    const frame = encode(v.opcode, payload.subarray(1), payload.subarray(0, 1), Buffer.from(v.mask, "hex"));
    assert.equal(frame.toString("hex"), unpacked(v.bytes).toString("hex"), v.about);
  }
  for (const v of vectors.handshakes) assert.equal(acceptOf(v.key), v.accept);
});

test("records", () => {
  const readers: Record<string, (f: Fields) => unknown> = {
    sandbox: models.toSandboxInfo,
    command: models.toCommandInfo,
    process: models.toProcessInfo,
    port: models.toPort,
    file_entry: models.toFileEntry,
    file_info: models.toFileInfo,
    file_event: models.toFileEvent,
    provider: models.toProviderInfo,
    snapshot: models.toSnapshot,
    secret: models.toSecretInfo,
    policy: models.toPolicy,
    egress_decision: models.toEgressDecision,
    version: models.toVersion,
    capabilities: models.toCapabilities,
  };
  const compare = (got: any, want: any, where: string): void => {
    if (got instanceof Date) assert.equal(got.getTime(), new Date(want).getTime(), where);
    else if (Array.isArray(want)) {
      assert.equal(got.length, want.length, where);
      want.forEach((item, i) => compare(got[i], item, `${where}[${i}]`));
    } else if (typeof want === "object" && want !== null) {
      for (const [key, value] of Object.entries(want)) {
        assert.ok(camel(key) in got, `${where} has no ${camel(key)}`);
        compare(got[camel(key)], value, `${where}.${key}`);
      }
    } else assert.equal(got, want, where);
  };
  const vectors = load("records.json");
  for (const v of vectors.accepted) {
    compare(readers[v.kind]!(new Fields(v.wire, v.kind)), v.fields, v.about);
  }
  for (const v of vectors.refused) {
    assert.throws(() => readers[v.kind]!(new Fields(v.wire, v.kind)), useshards.ProtocolError, v.about);
  }
});

test("inputs", () => {
  const vectors = load("inputs.json");
  const quiet = process.emitWarning;
  process.emitWarning = () => undefined;
  try {
    for (const v of vectors.remotes) {
      const take = (): string => resolve({ remote: v.value, apiKey: "k" }, {}).remote;
      if ("is" in v) assert.equal(take(), v.is);
      else assert.throws(take, useshards.ConfigurationError, `${v.value}: ${v.refused}`);
    }
    for (const v of vectors.api_keys) {
      const take = (): string => resolve({ remote: "https://a.example", apiKey: v.value }, {}).apiKey;
      if (v.accepted) assert.equal(take(), v.value);
      else assert.throws(take, (e: Error) => e instanceof useshards.ConfigurationError && (v.value.trim() === "" || !e.message.includes("secret")));
    }
    for (const v of vectors.settings) {
      let warned = false;
      process.emitWarning = () => void (warned = true);
      const args = Object.fromEntries(Object.entries(v.args).map(([key, value]) => [camel(key), value]));
      const take = (): string => resolve(args, v.env).remote;
      if (v.refused) assert.throws(take, useshards.ConfigurationError, v.about);
      else {
        assert.equal(take(), v.remote, v.about);
        assert.equal(warned, v.warns ?? false, v.about);
      }
    }
  } finally {
    process.emitWarning = quiet;
  }
  for (const v of vectors.segments) {
    if ("path" in v) assert.equal(route("sandboxes", v.value), `/v0/sandboxes/${v.path}`);
    else assert.throws(() => route("sandboxes", v.value), TypeError);
  }
  for (const v of vectors.commands) {
    if ("argv" in v) assert.deepEqual(argv(v.value), v.argv);
    else assert.throws(() => argv(v.value), TypeError);
  }
  for (const v of vectors.env) {
    if ("entries" in v) assert.deepEqual(environment(v.value), v.entries);
    else assert.throws(() => environment(v.value), { name: /^(TypeError|InvalidRequestError)$/ });
  }
  for (const v of vectors.modes) {
    if ("octal" in v) assert.equal(octal(v.value), v.octal);
    else assert.throws(() => octal(v.value), RangeError);
  }
  for (const v of vectors.ports) {
    const take = (): object => portForward({ hostPort: v.value, guestPort: v.value });
    if (v.accepted) take();
    else assert.throws(take, RangeError);
  }
});

test("archives of a hostile sandbox", async (t) => {
  const index = load("tar/index.json");
  assert.ok(Object.keys(index).length > 20);
  for (const [name, want] of Object.entries<any>(index)) {
    await t.test(name, async () => {
      const around = mkdtempSync(join(tmpdir(), "useshards-"));
      const target = join(around, "target");
      writeFileSync(join(around, "canary"), "canary");
      mkdirSync(target);
      const path = new URL(`tar/${name}.tar`, conformance);
      const spool = await open(path);
      try {
        const size = (await spool.stat()).size;
        if (want.refused) {
          await assert.rejects(unpack(spool, size, target, true, undefined), (e) => {
            assert.ok(e instanceof useshards.UnsafeArchiveError, String(e));
            assert.ok(e.message.endsWith(e.reason));
            return true;
          });
        } else {
          await unpack(spool, size, target, true, undefined);
          for (const [file, is] of Object.entries<any>(want.holds)) {
            const at = join(target, file);
            const info = lstatSync(at);
            if ("link" in is) assert.equal(readlinkSync(at), is.link);
            if ("data" in is) assert.equal(readFileSync(at, "utf8"), is.data);
            if ("mode" in is) assert.equal((info.mode & 0o7777).toString(8).padStart(4, "0"), is.mode, file);
            if (is.dir) assert.ok(info.isDirectory());
          }
        }
        assert.equal(readFileSync(join(around, "canary"), "utf8"), "canary");
        assert.deepEqual(readdirSync(around).sort(), ["canary", "target"]);
        assert.deepEqual(readdirSync(target).filter((n) => n.startsWith(".shard-")), []);
      } finally {
        await spool.close();
        rmSync(around, { recursive: true, force: true });
      }
    });
  }
});
