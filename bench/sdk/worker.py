"""The Python SDK at work, as the bench asks: one line in, one line of numbers out.

    worker.py sync|async SANDBOX

`exec N` answers the milliseconds of N commands one after the other; `upload LOCAL REMOTE` and `download REMOTE LOCAL`
answer the seconds it took. The server is that of SHARD_REMOTE, SHARD_API_KEY and SHARD_CA_FILE.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

from useshards import AsyncShard, Shard


async def asynchronous(sandbox_id: str) -> None:
    """Serves lines on an event loop, which nothing else uses meanwhile."""
    async with AsyncShard() as shard:
        sandbox = await shard.get(sandbox_id)
        for line in sys.stdin:
            verb, *args = line.split()
            times = []
            for _ in range(int(args[0]) if verb == "exec" else 1):
                begin = time.perf_counter()
                if verb == "exec":
                    check(await sandbox.exec(["true"]))
                else:
                    await getattr(sandbox.files, verb)(*args)
                times.append(time.perf_counter() - begin)
            answer(verb, times)


def synchronous(sandbox_id: str) -> None:
    """Serves lines on this thread."""
    with Shard() as shard:
        sandbox = shard.get(sandbox_id)
        for line in sys.stdin:
            verb, *args = line.split()
            times = []
            for _ in range(int(args[0]) if verb == "exec" else 1):
                begin = time.perf_counter()
                if verb == "exec":
                    check(sandbox.exec(["true"]))
                else:
                    getattr(sandbox.files, verb)(*args)
                times.append(time.perf_counter() - begin)
            answer(verb, times)


def check(result: Any) -> None:
    """A command that failed measures nothing."""
    if result.exit_code:
        raise RuntimeError(f"the command ended with exit code {result.exit_code}: {result.stderr}")


def answer(verb: str, times: list[float]) -> None:
    """One line: milliseconds of commands, seconds of copies."""
    print(*(f"{t * (1000 if verb == 'exec' else 1):.4f}" for t in times), flush=True)


if __name__ == "__main__":
    face, sandbox = sys.argv[1:]
    asyncio.run(asynchronous(sandbox)) if face == "async" else synchronous(sandbox)
