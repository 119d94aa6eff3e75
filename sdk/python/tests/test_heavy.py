"""What takes minutes or gigabytes, against a real server; not with QUICK."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host
import pytest
from conftest import descriptors

from useshards import APIError, AsyncShard, Shard, ShardConnectionError

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(1800)]
IMAGE = "local/busybox:1"

# A process of its own, so that the peak of its memory is that of the copies. Each of its lines: rate, peak in MiB.
COPIES = """
import asyncio, resource, sys, time
import useshards

twin, sandbox, source, back = sys.argv[1:]

def told(what, work):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.monotonic()
    work()
    took, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(what, round(size / took / 1e6), "MB/s,", (after - before) // 1024, "MiB more memory", flush=True)
    assert after - before < 200 << 10, f"memory grew by {after - before} KiB"

size = __import__("os").stat(source).st_size
if twin == "sync":
    with useshards.Shard() as shard:
        files = shard.get(sandbox).files
        told("upload", lambda: files.upload(source, "/root/large"))
        told("download", lambda: files.download("/root/large", back))
else:
    with asyncio.Runner() as runner:
        shard = useshards.AsyncShard()
        files = runner.run(shard.get(sandbox)).files
        told("upload", lambda: runner.run(files.upload(source, "/root/large")))
        told("download", lambda: runner.run(files.download("/root/large", back)))
        runner.run(shard.aclose())
"""


def test_gigabytes_in_flat_memory(live: host.Host, twin: str, tmp_path: Path) -> None:
    """Case 155, and back: 9 GiB on runc, 3 GiB on gVisor."""
    gib = 9 if live.provider == "runc" else 3
    size, marks = (gib << 30) + 1, (0, 1 << 30, (gib << 30) - 4)
    source, back = tmp_path / "source", tmp_path / "back"
    with open(source, "wb") as file:
        file.truncate(size)
        for at in marks:
            os.pwrite(file.fileno(), b"mark!", at)
    with Shard(live.remote, live.api_key, ca_file=live.ca_file) as shard:
        sandbox = shard.create(IMAGE, disk_mib=(gib + 1) << 10)
        try:
            env = {**os.environ, "SHARD_REMOTE": live.remote, "SHARD_API_KEY": live.api_key, "SHARD_CA_FILE": live.ca_file}
            command = [sys.executable, "-c", COPIES, twin, sandbox.id, str(source), str(back)]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            print(f"{gib} GiB on {live.provider}, {twin}: {done.stdout}")
            assert done.returncode == 0, done.stderr
            assert sandbox.files.stat("/root/large").size == back.stat().st_size == size
            with open(back, "rb") as file:
                assert [os.pread(file.fileno(), 5, at) for at in marks] == [b"mark!"] * 3
                assert os.pread(file.fileno(), 1 << 20, 5) == bytes(1 << 20)
        finally:
            sandbox.remove(force=True)
            source.unlink()
            back.unlink(missing_ok=True)


def test_a_slow_source_is_not_cut(live: host.Host, client: Callable[..., Any]) -> None:
    """Case 155: a stream that cannot seek, at 5 MB/s, takes longer than the 60 s bound of requests."""

    class Slow:
        left = 16

        def read(self, most: int) -> bytes:
            if not self.left:
                return b""
            time.sleep(4.2)
            self.left -= 1
            return b"x" * min(most, 1 << 20)

    c = client(live.remote, api_key=live.api_key, ca_file=live.ca_file)
    sandbox = c.run(c.shard.create(IMAGE))
    try:
        c.run(sandbox.files.write("/tmp/slow", Slow(), size=16 << 20))
        assert c.run(sandbox.files.stat("/tmp/slow")).size == 16 << 20
    finally:
        c.run(sandbox.remove(force=True))


def test_a_thousand_that_are_cancelled(live: host.Host) -> None:
    """Case 148: cancelled at any moment; then 100 normal calls work and no task, thread or descriptor is left."""

    async def main() -> None:
        async with AsyncShard(live.remote, live.api_key, ca_file=live.ca_file) as shard:
            sandbox = await shard.create(IMAGE)

            async def background() -> None:
                command = await sandbox.exec("sleep 0.05", background=True)
                try:
                    await command.wait()
                finally:
                    await command.disconnect()

            async def follow() -> None:
                async for _ in sandbox.follow_egress_log():
                    pass

            kinds: list[Callable[[], Any]] = [
                lambda: sandbox.exec("sleep 0.02", stdin="y"),
                background,
                follow,
                lambda: sandbox.files.read("/bin/busybox"),
                lambda: shard.list(all=True),
            ]

            async def leave(kind: Callable[[], Any]) -> int:
                work = asyncio.ensure_future(kind())
                await asyncio.sleep(random.random() * 0.06)
                work.cancel()
                outcome: object = (await asyncio.gather(work, return_exceptions=True))[0]
                if isinstance(outcome, APIError):
                    assert outcome.code == "exec_limit"
                elif isinstance(outcome, Exception):
                    raise outcome
                return isinstance(outcome, asyncio.CancelledError)

            try:
                await sandbox.exec("true")
                mine, cancelled = asyncio.all_tasks(), 0
                for _ in range(100):
                    cancelled += sum(await asyncio.gather(*(leave(kinds[n % 5]) for n in range(10))))
                assert cancelled > 500
                left: set[asyncio.Task[Any]] = set()
                for _ in range(600):
                    left = {t for t in asyncio.all_tasks() - mine if not t.done()}
                    if not left:
                        break
                    await asyncio.sleep(0.1)
                assert not left
                for n in range(100):
                    assert (await sandbox.exec(f"echo {n}")).stdout == f"{n}\n"
                print(f"{cancelled} of 1000 cancelled on {live.provider}")
            finally:
                await sandbox.remove(force=True)

    before, threads = descriptors(), threading.active_count()
    asyncio.run(main())
    gc.collect()
    assert descriptors() <= before
    assert threading.active_count() <= threads


def test_a_thousand_waits_that_are_left(live: host.Host) -> None:
    """Case 148 with threads: waits whose time is up, follows closed from elsewhere."""
    before, threads = descriptors(), threading.active_count()
    with Shard(live.remote, live.api_key, ca_file=live.ca_file) as shard:
        sandbox = shard.create(IMAGE)
        try:
            for n in range(500):
                command = sandbox.exec("sleep 0.05", background=True)
                try:
                    command.wait(timeout=random.random() * 0.04)
                except TimeoutError:
                    pass
                command.disconnect()
                with sandbox.follow_egress_log() as follow:
                    closer = threading.Timer(random.random() * 0.02, follow.close)
                    closer.start()
                    assert list(follow) == []
                    closer.join()
                if n % 5 == 0:
                    assert sandbox.exec(f"echo {n}").stdout == f"{n}\n"
        finally:
            sandbox.remove(force=True)
    gc.collect()
    assert descriptors() <= before
    assert threading.active_count() <= threads


def test_a_long_wait_ends_with_a_dead_server(live: host.Host, client: Callable[..., Any]) -> None:
    """wait(timeout=600) on a server that has stopped: heartbeats without an answer end it within 30 s."""
    c = client(live.remote, api_key=live.api_key, ca_file=live.ca_file)
    sandbox = c.run(c.shard.create(IMAGE))
    try:
        command = c.run(sandbox.exec("sleep 2; echo went on", background=True))
        begin = time.monotonic()
        with live.frozen_server(), pytest.raises(ShardConnectionError):
            c.run(command.wait(timeout=600))
        took = time.monotonic() - begin
        print(f"a dead server ended wait(timeout=600) after {took:.1f} s")
        assert took < 60  # twice as long, for a busy machine
        c.run(command.reconnect())
        assert c.run(command.wait(timeout=60)).stdout == "went on\n"
    finally:
        c.run(sandbox.remove(force=True))
