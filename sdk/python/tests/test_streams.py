"""What threads, TLS, time and cancels can do to a stream."""

from __future__ import annotations

import asyncio
import io
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import BOX, ScriptedServer

from useshards import AsyncShard, Shard, ShardConnectionError, UnknownLengthError, _socket
from useshards._frames import BINARY, PING, TEXT, Decoder, Message, encode
from useshards._output import STDERR, STDOUT, Output

pytestmark = pytest.mark.filterwarnings("ignore:the remote is http")

T = "2026-01-02T03:04:05Z"
RECORD = {
    "exec": "e1", "sandbox": BOX["id"], "command": ["x"], "state": "running", "exit_status": None,
    "started_at": T, "exited_at": None, "truncated": False, "lost_bytes": 0,
}  # fmt: skip
START = {"method": "POST", "path": "{box}/exec", "status": 201, "answer": RECORD}
EXIT = {"binary": 3, "json": {"code": 0, "signal": 0}}
CLOSE = {"close": 1000}


def stream(*steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"method": "GET", "path": "{box}/exec/e1", "upgrade": True, "stream": list(steps), **more}


def always(**more: Any) -> dict[str, Any]:
    return {"method": "GET", "path": "{box}/exec/e1", "always": True, "answer": {**RECORD, **more}}


# --- heartbeats ----------------------------------------------------------------------------------------------------


def test_a_dead_server_ends_a_wait(client: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection and says nothing any more: not even a pong. The real bound is twice 10 s."""
    assert 2 * _socket.HEARTBEAT <= 30
    monkeypatch.setattr(_socket, "HEARTBEAT", 0.3)
    # The server reads nothing while it pauses, so it answers no ping.
    with ScriptedServer([START, stream({"pause_ms": 60_000}), always()]) as server:
        c = client(server.remote)
        sandbox = c.run(c.shard.get("box"))
        with pytest.raises(ShardConnectionError, match="no sign of life"):
            c.run(sandbox.exec("x"))


def test_a_live_server_may_be_silent(client: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_socket, "HEARTBEAT", 0.3)
    # While it waits for a pong of ours it reads, and so answers pings of ours.
    steps: list[dict[str, Any]] = [{"expect_silence_ms": 1500}, {"binary": 1, "text": "late"}, EXIT, CLOSE]
    with ScriptedServer([START, stream(*steps), always()]) as server:
        c = client(server.remote)
        sandbox = c.run(c.shard.get("box"))
        assert c.run(sandbox.exec("x")).stdout == "late"
        assert not server.problems


def test_input_that_nobody_reads_is_no_dead_server(client: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that does not read keeps our ping from being read: the record says that all is well."""
    monkeypatch.setattr(_socket, "HEARTBEAT", 0.2)
    with ScriptedServer([START, stream({"pause_ms": 2000}, {"binary": 1, "text": "ok"}, EXIT, CLOSE), always()]) as server:
        c = client(server.remote)
        sandbox = c.run(c.shard.get("box"))
        assert c.run(sandbox.exec("x", stdin=b"x" * (16 << 20))).stdout == "ok"


# --- both ways at once ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem"
        " -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    try:
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"no certificate can be made here: {exc}")
    return folder


@pytest.mark.parametrize("tls", [False, True])
def test_large_input_against_large_output(client: Callable[..., Any], authority: Path, tls: bool) -> None:
    """A server that reads only when its output is taken: whoever waits for the other to read first hangs."""
    chunk: dict[str, Any] = {"binary": 1, "text": {"$repeat": ["o", 1 << 20]}}
    given = {"$repeat": ["i", 12 << 20]}
    steps: list[dict[str, Any]] = (
        [chunk] * 12 + [{"expect_input": given}, {"expect_end_of_input": True}] + [chunk] * 4 + [EXIT, CLOSE]
    )
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(authority / "cert.pem", authority / "key.pem")
    with ScriptedServer([START, stream(*steps)], tls=context) as server:
        c = client(server.remote, ca_file=authority / "cert.pem" if tls else None)
        sandbox = c.run(c.shard.get("box"))
        counted = [0]
        result = c.run(
            sandbox.exec("x", stdin="i" * (12 << 20), on_stdout=lambda b: counted.__setitem__(0, counted[0] + len(b)))
        )
        assert counted[0] == 16 << 20
        assert len(result.stdout_bytes) == 8 << 20
        assert not server.problems


# --- leaving -------------------------------------------------------------------------------------------------------


def test_cancels_at_random_moments_leave_nothing() -> None:
    """Case 148 against a scripted server: execs, waits, reads and follows; then the same client still works."""
    logs = {
        "method": "GET", "path": "{box}/egress-log", "query": {"follow": "true"}, "upgrade": True, "times": 10_000,
        "stream": [{"pause_ms": 30}],
    }  # fmt: skip
    exchanges = [
        {**START, "times": 10_000},
        stream({"binary": 1, "text": "a"}, {"pause_ms": 20}, EXIT, CLOSE, times=10_000),
        logs,
        {"method": "GET", "path": "/v0/version", "answer": {"version": "1", "api_version": "v0"}, "times": 10_000},
    ]

    async def main() -> None:
        async with AsyncShard(server.remote, "test-key") as shard:
            sandbox = await shard.get("box")

            async def background() -> None:
                command = await sandbox.exec("x", background=True)
                try:
                    await command.wait()
                finally:
                    await command.disconnect()

            async def follow() -> None:
                async for _ in sandbox.follow_egress_log():
                    pass

            kinds: list[Callable[[], Any]] = [lambda: sandbox.exec("x", stdin="y"), background, follow, shard.version]
            mine = asyncio.all_tasks()
            for n in range(200):
                work = asyncio.ensure_future(kinds[n % 4]())
                await asyncio.sleep((n * 7 % 50) / 1000)
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            for _ in range(100):
                left = {t for t in asyncio.all_tasks() - mine if not t.done()}
                if not left:
                    break
                await asyncio.sleep(0.02)
            assert not left
            for _ in range(20):
                assert (await shard.version()).version == "1"
                assert (await sandbox.exec("x")).stdout == "a"

    with ScriptedServer(exchanges) as server:
        before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
        asyncio.run(main(), debug=False)
        server.close()
        if before:
            assert len(os.listdir("/proc/self/fd")) <= before


def test_no_import_is_tried_again_with_every_request() -> None:
    """Where there is no sniffio, httpcore looked for it six times in each request."""
    tried: list[str] = []

    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            tried.append(name)

    async def main(remote: str) -> None:
        async with AsyncShard(remote, "test-key") as shard:
            await shard.version()
            sys.meta_path.insert(0, Finder)
            try:
                for _ in range(5):
                    await shard.version()
            finally:
                sys.meta_path.remove(Finder)

    answer = {"method": "GET", "path": "/v0/version", "answer": {"version": "1", "api_version": "v0"}, "times": 6}
    with ScriptedServer([answer]) as server:
        asyncio.run(main(server.remote))
    assert tried == []


def test_a_follow_is_closed_from_another_thread() -> None:
    logs = {
        "method": "GET",
        "path": "{box}/egress-log",
        "query": {"follow": "true"},
        "upgrade": True,
        "stream": [{"expect_gone": True}],
    }
    with ScriptedServer([logs]) as server, Shard(server.remote, "test-key") as shard:
        follow = shard.get("box").follow_egress_log()
        threading.Timer(0.3, follow.close).start()
        assert list(follow) == []
        assert list(follow) == []


def test_closing_the_client_ends_what_is_open(client: Callable[..., Any]) -> None:
    with ScriptedServer([START, stream({"expect_gone": True}), always()]) as server:
        c = client(server.remote)
        sandbox = c.run(c.shard.get("box"))
        command = c.run(sandbox.exec("x", background=True))
        c.run(c.shard.aclose() if c.loop else c.shard.close())
        with pytest.raises((ShardConnectionError, RuntimeError)):
            c.run(command.wait(timeout=20))
        with pytest.raises(RuntimeError, match="closed"):
            c.run(c.shard.version())


def test_a_callback_that_fails(client: Callable[..., Any]) -> None:
    def fail(_: bytes) -> None:
        raise ZeroDivisionError

    output = stream({"binary": 1, "text": "a"}, {"expect_gone": True}, times=2)
    with ScriptedServer([{**START, "times": 2}, output]) as server:
        c = client(server.remote)
        sandbox = c.run(c.shard.get("box"))
        with pytest.raises(ZeroDivisionError):
            c.run(sandbox.exec("x", on_stdout=fail))
        command = c.run(sandbox.exec("x", on_stdout=fail, background=True))
        with pytest.raises(ZeroDivisionError):
            c.run(command.wait(timeout=20))


def test_a_callback_may_let_go(client: Callable[..., Any]) -> None:
    commands: list[Any] = []
    ready = threading.Event()

    def leave(_: bytes) -> Any:
        ready.wait(5 if not commands else 0)
        return commands[0].disconnect()

    with ScriptedServer([START, stream({"pause_ms": 200}, {"binary": 1, "text": "a"}, {"expect_gone": True})]) as server:
        c = client(server.remote)
        sandbox = c.run(c.shard.get("box"))
        commands.append(c.run(sandbox.exec("x", on_stdout=leave, background=True)))
        ready.set()
        with pytest.raises(ShardConnectionError, match="let go"):
            c.run(commands[0].wait(timeout=20))


# --- bodies --------------------------------------------------------------------------------------------------------

PUT = {"method": "PUT", "path": "{box}/files", "query": {"path": "/a"}, "status": 204}


def test_streams_are_sent_with_their_length(client: Callable[..., Any], tmp_path: Path) -> None:
    with ScriptedServer([{**PUT, "body": "world"}, {**PUT, "body": "hello"}, {**PUT, "body": "hello"}]) as server:
        c = client(server.remote)
        files = c.run(c.shard.get("box")).files
        half = io.BytesIO(b"hello world")
        half.seek(6)
        c.run(files.write("/a", half))
        read, write = os.pipe()
        os.write(write, b"hello, and more that stays in the pipe")
        with open(read, "rb", buffering=0) as pipe:
            c.run(files.write("/a", pipe, size=5))
        os.close(write)
        c.run(files.write("/a", memoryview(b"hello")))
        assert not server.problems


def test_lengths_that_are_wrong(client: Callable[..., Any], tmp_path: Path) -> None:
    class Growing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            if self.tell() == 10:
                self.write(b"more")
                self.seek(10)
            return data

    with ScriptedServer([]) as server:
        c = client(server.remote)
        files = c.run(c.shard.get("box")).files
        read, write = os.pipe()
        os.close(write)
        with open(read, "rb", buffering=0) as pipe, pytest.raises(UnknownLengthError, match="size="):
            c.run(files.write("/a", pipe))
        with pytest.raises(TypeError):
            c.run(files.write("/a", io.StringIO("x")))
        with pytest.raises(TypeError):
            c.run(files.write("/a", 7))
        with pytest.raises(ValueError, match="size"):
            c.run(files.write("/a", b"x", size=2))
        with pytest.raises(UnknownLengthError, match="regular"):
            c.run(files.upload("/dev/null", "/a"))
    for source, size in ((io.BytesIO(b"short"), 10), (Growing(b"0123456789"), None)):
        # The server never gets a whole body, so it never answers.
        with ScriptedServer([PUT]) as server:
            c = client(server.remote)
            files = c.run(c.shard.get("box")).files
            with pytest.raises(UnknownLengthError):
                c.run(files.write("/a", source, size=size))
            c.run(c.shard.aclose() if c.loop else c.shard.close())


# --- properties ----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from([STDOUT, STDERR]), st.binary(max_size=40)), max_size=40), st.integers(0, 300))
def test_output_keeps_the_newest(chunks: list[tuple[int, bytes]], limit: int) -> None:
    output = Output(limit)
    for which, data in chunks:
        output.add(which, data)
    everything = [(which, byte) for which, data in chunks for byte in data]
    kept = everything[len(everything) - limit :] if limit < len(everything) else everything
    for which in (STDOUT, STDERR):
        data = output.data(which)
        assert data == bytes(byte for w, byte in kept if w == which)
        output.text(which, data, lost=False)


@given(st.text(max_size=60), st.integers(0, 80))
def test_a_cut_costs_one_mark(text: str, limit: int) -> None:
    output = Output(limit)
    output.add(STDOUT, text.encode())
    got = output.text(STDOUT, output.data(STDOUT), lost=False)
    assert text.endswith(got.removeprefix("\ufffd")) or got == text
    assert got.replace("\ufffd", "", 1).count("\ufffd") <= text.count("\ufffd")


@given(st.lists(st.tuples(st.sampled_from([BINARY, PING]), st.binary(max_size=125)), max_size=8), st.integers(1, 50))
def test_frames_come_apart_as_they_were_put_together(messages: list[tuple[int, bytes]], step: int) -> None:
    # A client's frames with the mask taken off are a server's.
    data = b"".join(bytes([f[0], f[1] & 0x7F]) + p for f, p in ((encode(o, p, bytes(4)), p) for o, p in messages))
    decoder, got = Decoder(), []
    for at in range(0, len(data), step):
        decoder.feed(data[at : at + step])
        while (message := decoder.next()) is not None:
            got.append(message)
    assert got == [Message(o, p) for o, p in messages]


@given(st.binary(max_size=400))
def test_no_bytes_break_the_decoder(data: bytes) -> None:
    from useshards import ProtocolError

    decoder = Decoder()
    decoder.feed(data)
    try:
        while (message := decoder.next()) is not None:
            assert message.opcode in (TEXT, BINARY, 8, 9, 10)
    except ProtocolError:
        pass


def test_no_interpreter_waits_for_a_thread() -> None:
    """A program that ends with a command in the background ends."""
    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); sys.path[:0] = sys.argv[2:]\n"
        "from useshards import Shard\n"
        "Shard(sys.argv[1], 'k').get('box').exec('x', background=True)\n"
    )
    with ScriptedServer([START, stream({"expect_gone": True})]) as server:
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", code, server.remote, *sys.path], check=True, timeout=60)
        assert time.monotonic() - began < 60
