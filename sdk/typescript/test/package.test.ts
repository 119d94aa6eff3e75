// The package as npm packs it, in a clean project: it installs, its types hold, and the README's samples print what they say.

import assert from "node:assert/strict";
import { execFile, spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { fileURLToPath } from "node:url";
import { Host, missing } from "./host.js";

const here = fileURLToPath(new URL("../", import.meta.url));

function run(cwd: string, command: string, ...args: string[]): string {
  const done = spawnSync(command, args, { cwd, encoding: "utf8" });
  assert.equal(done.status, 0, `${command} ${args.join(" ")}:\n${done.stdout}${done.stderr}`);
  return done.stdout;
}

/** The samples of the README, and what each prints. */
function samples(): { code: string; prints: string }[] {
  const readme = readFileSync(join(here, "README.md"), "utf8");
  return [...readme.matchAll(/```ts\n([^]*?)```\n\n<!-- prints -->\n```\n([^]*?)```/g)].map((m) => ({ code: m[1]!, prints: m[2]! }));
}

/** The samples of the user's guide, as they are written there; most stand in a program that has a sandbox. */
const inSandbox = (code: string): string => `import { Shard } from "useshards";
const shard = new Shard();
const sandbox = await shard.create({ image: "python:3.12-slim", memoryMiB: 512 });
try {
${code}
} finally {
  await sandbox.remove({ force: true });
  shard.close();
}
`;
const guide: { about: string; code: string; prints: string }[] = [
  {
    about: "run an agent's code",
    code: `import { Shard } from "useshards";

const code = 'print("hello from the agent")\\n';

const shard = new Shard();
try {
  const sandbox = await shard.create({ image: "python:3.12-slim", memoryMiB: 512 });
  try {
    await sandbox.files.write("/tmp/main.py", code);
    const result = await sandbox.exec(["python", "/tmp/main.py"]);
    console.log(result.exitCode, result.stdout, result.stderr);
  } finally {
    await sandbox.remove({ force: true });
  }
} finally {
  shard.close();
}
`,
    prints: "0 hello from the agent\n \n",
  },
  {
    about: "give the code its input",
    code: inSandbox(`
await sandbox.files.write("/tmp/main.py", "import json, os, sys; print(json.load(sys.stdin)['n'], os.environ['MODE'])");
const result = await sandbox.exec(["python", "/tmp/main.py"], {
  stdin: '{"n": 3}\\n',
  env: { MODE: "test" },
});
console.log(result.stdout.trim());`),
    prints: "3 test\n",
  },
  {
    about: "bound the time",
    code: inSandbox(`
await sandbox.files.write("/tmp/main.py", "print('quick')");
const command = await sandbox.exec(["python", "/tmp/main.py"], { background: true });
const deadline = AbortSignal.timeout(30_000);
let result;
try {
  result = await command.wait({ signal: deadline });
} catch (error) {
  if (!deadline.aborted) throw error;
  await command.kill("KILL");
  result = await command.wait();
}
console.log(result.exitCode, result.stdout.trim());`),
    prints: "0 quick\n",
  },
  {
    about: "bound memory, CPU and disk; the lists of the reference",
    code: `import { Shard } from "useshards";
const shard = new Shard();
const sandbox = await shard.create({
  image: "python:3.12-slim",
  memoryMiB: 1024,
  vcpus: 2,
  diskMiB: 4096,
});
const info = await sandbox.inspect();
console.log(info.state, info.resources.memoryMiB);
const { sandboxes, warnings } = await shard.list({ all: true });
for (const sandbox of sandboxes) console.log(sandbox.name, sandbox.info.state, warnings.length);
await sandbox.stop();
await sandbox.start();
await sandbox.remove({ force: true });
shard.close();
`,
    prints: "running 1024\nnull running 0\n",
  },
];

describe("the package", () => {
  const project = mkdtempSync(join(tmpdir(), "useshards-package-"));
  after(() => rmSync(project, { recursive: true, force: true }));

  before(() => {
    const archive = run(here, "npm", "pack", "--silent", "--pack-destination", project).trim();
    writeFileSync(join(project, "package.json"), '{"name":"clean","private":true,"type":"module"}');
    // Without dependencies nothing is fetched.
    run(project, "npm", "install", "--silent", "--offline", "--no-audit", "--no-fund", join(project, archive));
    mkdirSync(join(project, "node_modules/@types"));
    symlinkSync(join(here, "node_modules/@types/node"), join(project, "node_modules/@types/node"));
    symlinkSync(join(here, "node_modules/undici-types"), join(project, "node_modules/undici-types"));
    const compilerOptions = { target: "es2022", lib: ["es2022"], module: "nodenext", strict: true, exactOptionalPropertyTypes: true, skipLibCheck: false, types: ["node"], outDir: "out" };
    writeFileSync(join(project, "tsconfig.json"), JSON.stringify({ compilerOptions, include: ["*.ts"] }));
    samples().forEach(({ code }, i) => writeFileSync(join(project, `sample${i}.ts`), code));
    guide.forEach(({ code }, i) => writeFileSync(join(project, `guide${i}.ts`), code));
    writeFileSync(
      join(project, "consumer.ts"),
      `import { Shard, type Command, type CommandResult, type SandboxInfo, ConflictError, defaultOutputLimit } from "useshards";
export async function use(shard: Shard, signal: AbortSignal): Promise<SandboxInfo> {
  await using sandbox = await shard.create({ image: "x", ports: [{ hostPort: 1, guestPort: 2 }], signal });
  const result: CommandResult = await sandbox.exec(["x"], { signal, outputLimitBytes: defaultOutputLimit });
  const command: Command = await sandbox.exec("x", { background: true, tty: { rows: 1, cols: 2 }, stdin: true });
  const text: string = await sandbox.files.read("/x", { encoding: "utf8" });
  const bytes: Uint8Array = await sandbox.files.read("/x");
  for await (const chunk of (await sandbox.processes.get("p")).followLogs({ signal })) chunk satisfies Uint8Array;
  // @ts-expect-error a foreground command has no handle
  result.wait();
  // @ts-expect-error no such option
  await shard.list({ everything: true });
  new ConflictError(409, "in_use", "x").holders satisfies string[];
  void [command.id, text, bytes];
  return sandbox.info;
}
`,
    );
  });

  test("holds what it should and nothing else", () => {
    const files = readdirSync(join(project, "node_modules/useshards"), { recursive: true, encoding: "utf8" });
    for (const name of ["README.md", "LICENSE", "package.json", "dist/index.js", "dist/index.d.ts", "src/index.ts"]) assert.ok(files.includes(name), name);
    for (const name of files) assert.match(name, /^(README\.md|LICENSE|package\.json|(dist|src)(\/[a-z]+\.(js|d\.ts|ts)(\.map)?)?)$/);
    assert.deepEqual(readdirSync(join(project, "node_modules")).filter((n) => !n.startsWith(".")).sort(), ["@types", "undici-types", "useshards"]);
  });

  test("its types and the README's samples compile strictly", () => {
    assert.ok(samples().length >= 4);
    run(project, process.execPath, join(here, "node_modules/typescript/bin/tsc"), "-p", ".");
  });

  test("its names are there at run time", () => {
    const script = 'import * as m from "useshards"; console.log(Object.keys(m).sort().join(" "))';
    assert.equal(
      run(project, process.execPath, "--input-type=module", "-e", script).trim(),
      "APIError AuthenticationError Command CommandNotStartedError Commands ConfigurationError ConflictError Files InvalidRequestError " +
        "NotFoundError PermissionDeniedError Policies Ports Process Processes ProtocolError Sandbox Secrets ServerError Shard " +
        "ShardConnectionError ShardError Snapshots UnknownLengthError UnsafeArchiveError UnsupportedError defaultOutputLimit",
    );
  });

  test("without Symbol.asyncDispose it works, and adds nothing to the globals", () => {
    const script = `
      delete Symbol.asyncDispose;
      const before = Reflect.ownKeys(Symbol).length + Reflect.ownKeys(globalThis).length;
      const { Shard } = await import("useshards");
      const shard = new Shard({ remote: "https://a.example", apiKey: "k" });
      await shard[Symbol.for("Symbol.asyncDispose")]();
      if (Reflect.ownKeys(Symbol).length + Reflect.ownKeys(globalThis).length !== before) throw new Error("globals");`;
    // Node's own property cannot be deleted everywhere; where it can, this is what Node 20.3 looks like.
    run(project, process.execPath, "--input-type=module", "-e", `try { delete Symbol.asyncDispose } catch {}; if (Symbol.asyncDispose === undefined) { ${script} }`);
  });

  describe("the samples of the README and the guide print what they say", { skip: missing() }, () => {
    const host = new Host();
    let broken: string | undefined;
    before(async () => {
      await host.start("runc");
      try {
        host.importPython();
      } catch (error) {
        broken = `the Python image cannot be built here: ${(error as Error).message}`;
      }
    });
    after(() => host.close());
    const programs = [
      ...samples().map(({ prints }, i) => ({ about: `sample ${i + 1}`, file: `sample${i}.js`, prints })),
      ...guide.map(({ about, prints }, i) => ({ about: `the guide: ${about}`, file: `guide${i}.js`, prints })),
    ];
    for (const { about, file, prints } of programs) {
      test(about, { timeout: 120_000 }, async (t) => {
        if (broken !== undefined) return t.skip(broken);
        const env = { ...process.env, SHARD_REMOTE: host.remote, SHARD_API_KEY: host.apiKey, SHARD_CA_FILE: host.caFile };
        const stdout = await new Promise<string>((resolve, reject) => {
          execFile(process.execPath, [join(project, "out", file)], { env }, (error, out, err) => (error === null ? resolve(out) : reject(new Error(err))));
        });
        assert.equal(stdout, prints);
        assert.equal(host.cli("list", "--all", "-q"), "");
      });
    }
  });
});
