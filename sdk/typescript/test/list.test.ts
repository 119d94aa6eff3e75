// The live suite holds every check of conformance/live.json, the one list that the SDKs share.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

const here = new URL("..", import.meta.url);
const checks = JSON.parse(readFileSync(new URL("../../conformance/live.json", here), "utf8")) as { check: string; typescript: string }[];
const suite = ["live", "heavy"].map((name) => readFileSync(new URL(`test/${name}.ts`, here), "utf8")).join("");

test("every shared live check is in the suite", () => {
  for (const { check, typescript } of checks) assert.ok(suite.includes(`it("${typescript}"`), check);
});
