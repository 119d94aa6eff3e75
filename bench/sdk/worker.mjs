// The TypeScript SDK at work, as the bench asks: the same lines as worker.py.
//
//     worker.mjs PACKAGE SANDBOX
import { createInterface } from "node:readline";

const [, , from, id] = process.argv;
const { Shard } = await import(from);
const shard = new Shard();
const sandbox = await shard.get(id);
for await (const line of createInterface({ input: process.stdin })) {
  const [verb, ...args] = line.split(" ");
  const times = [];
  for (let i = verb === "exec" ? Number(args[0]) : 1; i > 0; i--) {
    const begin = performance.now();
    if (verb === "exec") {
      const result = await sandbox.exec(["true"]);
      if (result.exitCode !== 0) throw new Error(`the command ended with exit code ${result.exitCode}: ${result.stderr}`);
    } else {
      await sandbox.files[verb](...args);
    }
    const took = performance.now() - begin;
    times.push((verb === "exec" ? took : took / 1000).toFixed(4));
  }
  console.log(times.join(" "));
}
shard.close();
