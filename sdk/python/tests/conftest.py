"""Fixtures: both twins, and a host for live tests that is skipped, with the reason, where it cannot be."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import host
import pytest

from useshards import AsyncShard, Shard

TWINS = {"sync": Shard, "async": AsyncShard}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's own settings lead a test elsewhere."""
    for name in [n for n in os.environ if n.startswith("SHARD_") and n != "SHARD_TEST_BIN"]:
        monkeypatch.delenv(name)


@pytest.fixture(params=["sync", "async"])
def twin(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Client:
    """A client of either twin that is used in the same way: run() waits where there is something to wait for."""

    def __init__(self, twin: str, remote: str, **options: Any) -> None:
        self.loop = asyncio.new_event_loop() if twin == "async" else None
        self.shard: Any = TWINS[twin](remote, options.pop("api_key", "test-key"), **options)

    def run(self, value: Any) -> Any:
        if self.loop is not None and asyncio.iscoroutine(value):
            return self.loop.run_until_complete(value)
        return value

    def close(self) -> None:
        self.run(self.shard.aclose() if self.loop else self.shard.close())
        if self.loop is not None:
            tasks = asyncio.all_tasks(self.loop)
            self.loop.run_until_complete(asyncio.sleep(0))
            left = [t for t in tasks if not t.done()]
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
            assert not left, f"tasks are left: {left}"


@pytest.fixture
def client(twin: str) -> Iterator[Callable[..., Client]]:
    """Makes clients; when the test ends, nothing of them is left: no task, thread or socket."""
    threads, made = set(threading.enumerate()), list[Client]()
    before = descriptors()

    def make(remote: str, **options: Any) -> Client:
        made.append(Client(twin, remote, **options))
        return made[-1]

    yield make
    for c in made:
        c.close()
    left = set()
    for attempt in range(200):
        if attempt:
            gc.collect()
        left = {t for t in set(threading.enumerate()) - threads if t.name == "useshards"}
        if not left and descriptors() <= before:
            return
        time.sleep(0.02)
    assert not left, f"threads are left: {left}"
    assert descriptors() <= before, "descriptors are left"


def descriptors() -> int:
    """How many descriptors this process has open; 0 where nobody can tell."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


@pytest.fixture(scope="session", params=["gvisor", "runc"])
def live(request: pytest.FixtureRequest) -> Iterator[host.Host]:
    """A daemon and `shard serve` over TLS, with one provider after the other."""
    reason = host.missing()
    if reason:
        pytest.skip(reason)
    try:
        here = host.Host(request.param)
    except RuntimeError as exc:
        pytest.skip(f"no daemon with {request.param} here: {exc}")
    try:
        here.import_busybox()
        yield here
    finally:
        here.close()


@pytest.fixture
def connect(live: host.Host, client: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: client(live.remote, api_key=live.api_key, ca_file=live.ca_file)


@pytest.fixture
def box(live: host.Host, connect: Callable[[], Any]) -> Iterator[tuple[Any, Any]]:
    """A sandbox and how to wait for its calls; it is removed at the end."""
    c = connect()
    sandbox = c.run(c.shard.create("local/busybox:1"))
    try:
        yield sandbox, c.run
    finally:
        c.run(sandbox.remove(force=True))
