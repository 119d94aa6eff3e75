// Every name that the package exports is explained where an editor shows it: in the declarations.

import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { test } from "node:test";

const dist = new URL("../dist/", import.meta.url);
const declarations = (file: string): string => readFileSync(new URL(file, dist), "utf8");

test("every public name has a comment, and every method an example", () => {
  const lists = [...declarations("index.d.ts").matchAll(/export (?:type )?\{([^}]*)\}/g)];
  const names = new Set(lists.flatMap((list) => list[1]!.split(",").map((name) => name.replace(/\btype\b/, "").trim())));
  const problems: string[] = [];
  const seen = new Set<string>();
  for (const file of readdirSync(dist).filter((name) => name.endsWith(".d.ts") && name !== "index.d.ts")) {
    let owner: string | undefined;
    let isClass = false;
    for (const [, doc = "", line = ""] of declarations(file).matchAll(/^(?: *(\/\*\*[^]*?\*\/)\n)?( *[^\s/*].*)$/gm)) {
      const top = /^export (?:declare )?(class|interface|const|function|type) (\w+)/.exec(line);
      if (top !== null) {
        owner = names.has(top[2]!) ? top[2] : undefined;
        isClass = top[1] === "class";
        if (owner !== undefined && doc === "") problems.push(`${owner} has no comment`);
        if (owner !== undefined) seen.add(owner);
        continue;
      }
      const member = /^    (?!private |constructor\()(?:readonly |get |set |static )*(\w+)\??([:(<])/.exec(line);
      if (owner === undefined || member === null) continue;
      const name = `${owner}.${member[1]}`;
      if (seen.has(name) || doc.includes("@internal")) continue; // the first overload has the comment
      seen.add(name);
      if (doc === "") problems.push(`${name} has no comment`);
      else if (isClass && member[2] !== ":" && !/^    get /.test(line) && !doc.includes("@example")) problems.push(`${name} has no example`);
    }
  }
  assert.deepEqual(problems, []);
  assert.deepEqual([...names].filter((name) => name !== "" && !seen.has(name)), []);
  assert.ok(seen.size > 200, `only ${seen.size} names were found`);
});
