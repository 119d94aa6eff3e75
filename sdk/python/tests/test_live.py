"""Against a real `shard serve` over TLS, with gVisor and runc: the guide's samples, and what the contract promises."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host
import pytest

from useshards import (
    AsyncShard,
    CommandNotStartedError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    Shard,
    ShardConnectionError,
    TerminalSize,
    UnsupportedError,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
README = Path(__file__).resolve().parents[1] / "README.md"
IMAGE = "local/busybox:1"


# --- samples -------------------------------------------------------------------------------------------------------


def samples() -> list[tuple[str, str, str]]:
    """Title, code and printed text of each sample of the README that says what it prints."""
    text = README.read_text()
    found = re.findall(r"### (.+?)\n.*?```python\n(.*?)```\n(?:.*?It prints:\n\n```text\n(.*?)```)?", text, re.DOTALL)
    return [(title, code, printed) for title, code, printed in found]


@pytest.mark.parametrize(("title", "code", "printed"), [pytest.param(*s, id=s[0]) for s in samples()])
def test_readme(
    live: host.Host,
    title: str,
    code: str,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Every sample of the README runs as written and prints what it says; a line "…" stands for anything."""
    monkeypatch.setenv("SHARD_REMOTE", live.remote)
    monkeypatch.setenv("SHARD_API_KEY", live.api_key)
    monkeypatch.setenv("SHARD_CA_FILE", live.ca_file)
    monkeypatch.chdir(tmp_path)
    code = code.replace("alpine:3.20", IMAGE)
    exec(compile(code, title, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == printed
    with Shard() as shard:
        assert not shard.list(all=True).sandboxes


@pytest.fixture(scope="session")
def python_image(live: host.Host) -> str:
    try:
        return live.import_python()
    except subprocess.CalledProcessError as exc:
        pytest.skip(f"the Python image cannot be built here: {exc.stderr[-300:]}")


def test_guide_agent_code(live: host.Host, python_image: str, connect: Callable[[], Any]) -> None:
    """The page on running an agent's code."""
    c = connect()
    code = 'import json, os, sys\nprint("hello from the agent")\nif os.environ.get("MODE"): print(json.load(sys.stdin)["n"])\n'
    sandbox = c.run(c.shard.create("python:3.12-slim", memory_mib=512))
    try:
        c.run(sandbox.files.write("/tmp/main.py", code))
        result = c.run(sandbox.exec(["python", "/tmp/main.py"]))
        assert (result.exit_code, result.stdout, result.stderr) == (0, "hello from the agent\n", "")
        result = c.run(sandbox.exec(["python", "/tmp/main.py"], stdin='{"n": 3}\n', env={"MODE": "test"}))
        assert result.stdout == "hello from the agent\n3\n"
        command = c.run(sandbox.exec(["python", "-c", "import time; time.sleep(600)"], background=True))
        with pytest.raises(TimeoutError):
            c.run(command.wait(timeout=1))
        c.run(command.kill("KILL"))
        assert c.run(command.wait()).exit_code == 137
    finally:
        c.run(sandbox.remove(force=True))


# The samples of the Python page, in its order, in a program that has a shard and a sandbox.
GUIDE = """
result = sandbox.exec("echo $GREETING from $(pwd)", env={"GREETING": "hello"}, workdir="/tmp")
print(result.stdout)

command = sandbox.exec("sleep 5; echo done", background=True)
print(command.id)
result = command.wait(timeout=60)

sandbox.files.write("/root/notes.txt", "hello\\n")
print(sandbox.files.read_text("/root/notes.txt"), end="")

forward = sandbox.ports.add(9000, 8000)
print(forward.listening, forward.reachable_on)
sandbox.ports.remove(9000)

from useshards import Restart

ticker = sandbox.run("for i in 1 2 3; do echo tick $i; done", name="ticker", restart=Restart(policy="no"))
print(ticker.wait(timeout=60).status.exit)
print(ticker.logs(), end="")

import os

from useshards import PolicyRule

shard.secrets.set("API_TOKEN", value=os.environ["API_TOKEN"], destinations=["api.example.com"])
shard.policies.set("api-only", [PolicyRule("allow", "api.example.com")])
sandbox = shard.create("alpine:3.20", secrets=["API_TOKEN"], policy="api-only", memory_mib=512)

if shard.capabilities().fork:
    copy = sandbox.fork(name="demo-copy")
"""


def test_guide_python_page(live: host.Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("API_TOKEN", "the-value-of-the-token")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        code = GUIDE.replace("alpine:3.20", IMAGE).replace("9000", str(probe.getsockname()[1]))
    with Shard(live.remote, live.api_key, ca_file=live.ca_file) as shard:
        names: dict[str, Any] = {"shard": shard, "sandbox": shard.create(IMAGE)}
        try:
            exec(compile(code, "guide", "exec"), names)
            said = capsys.readouterr().out
            expected = (
                r"hello from /tmp\n\n\S+\nhello\n(True|False) .*\nExitStatus\(code=0, signal=0\)\ntick 1\ntick 2\ntick 3\n"
            )
            assert re.fullmatch(expected, said), said
            assert names["result"].stdout == "done\n"
            held = names["sandbox"]
            assert (held.info.secrets, held.info.policy, held.exec("echo $API_TOKEN").stdout) == (
                ["API_TOKEN"],
                "api-only",
                "mock-API_TOKEN\n",
            )
        finally:
            for sandbox in shard.list(all=True):
                sandbox.remove(force=True)
            shard.secrets.remove("API_TOKEN", force=True)
            shard.policies.remove("api-only")


def test_guide_asyncio(live: host.Host) -> None:
    async def main() -> list[str]:
        async with AsyncShard(live.remote, live.api_key, ca_file=live.ca_file) as shard:
            sandbox = await shard.create(IMAGE, memory_mib=512)
            try:
                results = await asyncio.gather(*(sandbox.exec(f"echo {n}") for n in range(3)))
                return [r.stdout for r in results]
            finally:
                await sandbox.remove(force=True)

    assert asyncio.run(main()) == ["0\n", "1\n", "2\n"]


# --- sandboxes -----------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_lifecycle(live: host.Host, connect: Callable[[], Any]) -> None:
    c = connect()
    shard = c.shard
    sandbox = c.run(shard.create(IMAGE, name="life", env={"GREETING": "hello"}, workdir="/tmp"))
    try:
        assert sandbox.info.state == "running"
        assert sandbox.info.provider == live.provider
        assert c.run(sandbox.exec("echo $GREETING from $(pwd)")).stdout == "hello from /tmp\n"
        assert c.run(shard.get("life")).id == sandbox.id
        assert [s.id for s in c.run(shard.list()).sandboxes] == [sandbox.id]
        with pytest.raises(ConflictError) as taken:
            c.run(shard.create(IMAGE, name="life"))
        assert taken.value.code == "name_taken"
        c.run(sandbox.files.write("/tmp/kept", "kept"))
        c.run(sandbox.stop())
        assert sandbox.info.state == "stopped"
        assert not c.run(shard.list()).sandboxes
        assert len(c.run(shard.list(all=True)).sandboxes) == 1
        with pytest.raises(ConflictError) as stopped:
            c.run(sandbox.exec("true"))
        assert stopped.value.code == "sandbox_not_running"
        c.run(sandbox.start())
        assert c.run(sandbox.files.read("/tmp/kept")) == b"kept"
        if not c.run(shard.capabilities()).fork:
            with pytest.raises(UnsupportedError):
                c.run(sandbox.fork())
        with pytest.raises(ConflictError):
            c.run(sandbox.remove())
    finally:
        c.run(sandbox.remove(force=True))
    with pytest.raises(NotFoundError):
        c.run(sandbox.inspect())
    assert c.run(shard.version()).api_version == "v0"


def test_a_wrong_key_is_refused_and_never_shown(live: host.Host, client: Callable[..., Any]) -> None:
    from useshards import AuthenticationError

    c = client(live.remote, api_key="not.a.key", ca_file=live.ca_file)
    with pytest.raises(AuthenticationError) as refused:
        c.run(c.shard.version())
    assert "not.a.key" not in str(refused.value)


def test_an_unknown_authority_is_refused(live: host.Host, client: Callable[..., Any]) -> None:
    c = client(live.remote, api_key=live.api_key)
    with pytest.raises(ShardConnectionError, match="cannot reach"):
        c.run(c.shard.version())


# --- commands ------------------------------------------------------------------------------------------------------


def test_every_byte_arrives(box: tuple[Any, Any]) -> None:
    """Case 1: nothing of the output is lost when a command ends at once."""
    sandbox, run = box
    script = "head -c 5000003 /dev/zero | tr '\\0' a; head -c 1000001 /dev/zero | tr '\\0' b >&2; exit 3"
    for _ in range(5):
        seen = {"out": hashlib.sha256(), "err": hashlib.sha256()}
        result = run(sandbox.exec(script, on_stdout=seen["out"].update, on_stderr=seen["err"].update))
        assert result.exit_code == 3
        assert result.lost_bytes == 0
        assert seen["out"].hexdigest() == hashlib.sha256(b"a" * 5000003).hexdigest()
        assert seen["err"].hexdigest() == hashlib.sha256(b"b" * 1000001).hexdigest()


@pytest.mark.quick
def test_the_end_of_input_is_passed_on(box: tuple[Any, Any]) -> None:
    """Case 3."""
    sandbox, run = box
    for given in ("hi", "", b"\x00\xff\r\n"):
        result = run(sandbox.exec("cat", stdin=given))
        assert result.stdout_bytes == (given.encode() if isinstance(given, str) else given)
    command = run(sandbox.exec("cat", stdin=True, background=True))
    run(command.write_stdin("one "))
    run(command.write_stdin(b"two"))
    run(command.close_stdin())
    assert run(command.wait(timeout=60)).stdout == "one two"


def test_large_input_against_large_output(box: tuple[Any, Any]) -> None:
    """Reading and writing one TLS connection at once, both ways more than any buffer holds."""
    sandbox, run = box
    data = os.urandom(1 << 20) * 24
    seen = hashlib.sha256()
    result = run(sandbox.exec("cat", stdin=data, on_stdout=seen.update, output_limit_bytes=0))
    assert result.exit_code == 0
    assert result.lost_bytes == 0
    assert seen.hexdigest() == hashlib.sha256(data).hexdigest()


def test_characters_and_limits(box: tuple[Any, Any]) -> None:
    """Cases 14, 145 and 151."""
    sandbox, run = box
    result = run(sandbox.exec("for b in '\\360' '\\237' '\\230' '\\200'; do printf $b; done; printf '\\0\\377\\r\\n' >&2"))
    assert result.stdout == "😀"
    assert result.stderr_bytes == b"\x00\xff\r\n"
    big = "head -c 20971520 /dev/zero | tr '\\0' x; printf fatal >&2"
    result = run(sandbox.exec(big))
    assert result.stderr == "fatal"
    assert len(result.stdout_bytes) == (8 << 20) - 5
    assert result.lost_bytes == 0
    least = run(sandbox.exec(big, output_limit_bytes=1))
    assert len(least.stdout_bytes + least.stderr_bytes) == 1
    none = run(sandbox.exec(big, output_limit_bytes=0))
    assert none.stdout_bytes + none.stderr_bytes == b""
    assert len(run(sandbox.exec(big, output_limit_bytes=100 << 20)).stdout_bytes) == 20971520


def test_arguments_arrive_unchanged(box: tuple[Any, Any]) -> None:
    """Case 15."""
    sandbox, run = box
    words = ["", "a\nb", "'\"", "$HOME;ls", "-x", "*", "é😀"]
    result = run(sandbox.exec(["sh", "-c", 'for a; do printf "%s\\0" "$a"; done', "sh", *words]))
    assert result.stdout_bytes.decode().split("\0")[:-1] == words
    assert run(sandbox.exec("cat <<X\na $V b\nX", env={"V": "1\n2=3"})).stdout == "a 1\n2=3 b\n"
    assert run(sandbox.exec("printf %s $#", env={})).exit_code == 0
    for bad in ({"": "x"}, {"A=B": "x"}, {"A\0": "x"}):
        with pytest.raises(InvalidRequestError):
            run(sandbox.exec("true", env=bad))


def test_never_started_and_ended_with_an_error(box: tuple[Any, Any]) -> None:
    """Case 10."""
    sandbox, run = box
    run(sandbox.files.write("/tmp/plain", "x"))
    run(sandbox.files.write("/tmp/script", "#!/nowhere\n", mode=0o755))
    for command, options in (
        (["nosuch"], {}),
        (["/tmp/plain"], {}),
        (["/tmp"], {}),
        (["/tmp/script"], {}),
        (["true"], {"workdir": "/nowhere"}),
        (["true"], {"user": "nosuchuser"}),
    ):
        with pytest.raises((CommandNotStartedError, InvalidRequestError)):
            run(sandbox.exec(command, **options))
    assert run(sandbox.commands.list()) == []
    for script, code in (("nosuch", 127), ("exit 125", 125), ("exit 126", 126), ("kill -9 $$", 137)):
        result = run(sandbox.exec(script))
        assert (result.exit_code, result.signal) == (code, None)


def test_leaving_never_ends_a_command(box: tuple[Any, Any]) -> None:
    """Cases 6 and 9: a wait that runs out, a disconnect, another client."""
    sandbox, run = box
    command = run(sandbox.exec("echo early; sleep 2; echo late; touch /tmp/done", background=True))
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        run(command.wait(timeout=0.5))
    assert 0.4 < time.monotonic() - began < 20
    run(command.disconnect())
    assert run(command.inspect()).state == "running"
    with pytest.raises(RuntimeError):
        run(command.write_stdin("x"))
    again = run(sandbox.commands.get(command.id))
    assert run(again.wait(timeout=60)).stdout == "early\nlate\n"
    assert run(sandbox.files.stat("/tmp/done")).type == "file"
    assert [(i.id, i.exit_code) for i in run(sandbox.commands.list())] == [(command.id, 0)]
    with pytest.raises(ConflictError) as ended:
        run(again.kill())
    assert ended.value.code == "exec_exited"


def test_a_terminal(box: tuple[Any, Any]) -> None:
    """Case 7."""
    sandbox, run = box
    assert run(sandbox.exec(["stty", "size"], tty=TerminalSize(40, 120))).stdout.strip() == "40 120"
    command = run(sandbox.exec(["sh"], tty=True, stdin=True, background=True))
    run(command.resize(50, 200))
    run(command.write_stdin("stty size; exit 7\n"))
    result = run(command.wait(timeout=60))
    assert result.exit_code == 7
    assert "50 200" in result.stdout


# --- many at once --------------------------------------------------------------------------------------------------


def test_200_at_once(live: host.Host) -> None:
    """200 commands at once through one AsyncShard, over sandboxes that run at most 32 each."""

    async def main() -> None:
        async with AsyncShard(live.remote, live.api_key, ca_file=live.ca_file) as shard:
            sandboxes = await asyncio.gather(*(shard.create(IMAGE) for _ in range(8)))
            try:
                results = await asyncio.gather(*(sandboxes[n % 8].exec(f"sleep 1; echo {n}") for n in range(200)))
                assert [r.stdout for r in results] == [f"{n}\n" for n in range(200)]
            finally:
                await asyncio.gather(*(s.remove(force=True) for s in sandboxes))

    asyncio.run(main())


def test_cancelled_commands_go_on(live: host.Host) -> None:
    """Case 148: cancelled at any moment, nothing is left here and everything goes on there."""

    async def main() -> None:
        async with AsyncShard(live.remote, live.api_key, ca_file=live.ca_file) as shard:
            sandbox = await shard.create(IMAGE)
            try:
                tasks = asyncio.all_tasks()
                for n in range(60):
                    work = asyncio.create_task(sandbox.exec(f"sleep 0.2; echo {n} >>/tmp/ran", stdin="x" * (n * 1000)))
                    await asyncio.sleep(n * 0.002)
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
                assert asyncio.all_tasks() == tasks
                for n in range(20):
                    assert (await sandbox.exec(f"echo {n}")).stdout == f"{n}\n"
                ran = 0
                for _ in range(200):
                    ran = len((await sandbox.files.read_text("/tmp/ran")).split())
                    if not any(i.state == "running" for i in await sandbox.commands.list()):
                        break
                    await asyncio.sleep(0.1)
                assert ran > 20
            finally:
                await sandbox.remove(force=True)

    asyncio.run(main())


def test_threads_share_a_client(live: host.Host) -> None:
    with Shard(live.remote, live.api_key, ca_file=live.ca_file) as shard:
        sandbox = shard.create(IMAGE)
        try:
            got: dict[int, str] = {}
            threads = [
                threading.Thread(target=lambda n=n: got.update({n: sandbox.exec("cat", stdin=str(n)).stdout}))
                for n in range(24)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert got == {n: str(n) for n in range(24)}
        finally:
            sandbox.remove(force=True)


# --- files ---------------------------------------------------------------------------------------------------------


def test_success_means_that_the_file_is_there(box: tuple[Any, Any], tmp_path: Path) -> None:
    """Case 31."""
    sandbox, run = box
    for size in (0, 1, 4095, 4096, 18432, 65535, 65537, (4 << 20) + 1, (8 << 20) + 1):
        data = os.urandom(size)
        local = tmp_path / "local"
        local.write_bytes(data)
        local.chmod(0o640)
        run(sandbox.files.write("/tmp/w", data))
        run(sandbox.files.upload(local, "/tmp/u"))
        with open(local, "rb") as stream:
            run(sandbox.files.write("/tmp/s", stream))
        want = hashlib.sha256(data).hexdigest()
        sums = run(sandbox.exec("sha256sum /tmp/w /tmp/u /tmp/s")).stdout.split()
        assert sums[::2] == [want] * 3
        assert run(sandbox.files.read("/tmp/w")) == data
        run(sandbox.files.download("/tmp/u", tmp_path / "back"))
        assert (tmp_path / "back").read_bytes() == data
        assert (tmp_path / "back").stat().st_mode & 0o7777 == 0o640


def test_files(box: tuple[Any, Any]) -> None:
    """Cases 33, 35, 37 and 39, as far as a client shows them."""
    sandbox, run = box
    files = sandbox.files
    run(files.write("/tmp/a/b/c", "x", mode=0o640, parents=True, user="nobody"))
    info = run(files.stat("/tmp/a/b/c"))
    assert (info.mode, info.uid, info.type, info.size) == (0o640, 65534, "file", 1)
    with pytest.raises(NotFoundError):
        run(files.write("/nowhere/c", "x"))
    run(files.mkdir("/tmp/d", mode=0o700))
    with pytest.raises(InvalidRequestError):
        run(files.mkdir("/tmp/d"))
    run(files.mkdir("/tmp/d", parents=True))
    run(sandbox.exec("cd /tmp/d; printf 1 >$(printf 'bad\\377name'); printf 2 >'new\nline'; ln -s / root"))
    entries = {e.name: e.type for e in run(files.list("/tmp/d"))}
    assert entries == {"bad\udcffname": "file", "new\nline": "file", "root": "symlink"}
    assert run(files.read("/tmp/d/bad\udcffname")) == b"1"
    assert run(files.read("/tmp/d/new\nline")) == b"2"
    assert b"processor" in run(files.read("/proc/cpuinfo"))
    for bad in ("/tmp", "/tmp/d/root"):
        with pytest.raises(InvalidRequestError):
            run(files.read(bad))
    for odd in ("", ".", "relative", "a/../b", "/x\0y"):
        with pytest.raises(InvalidRequestError):
            run(files.read(odd))
    with pytest.raises(InvalidRequestError):
        run(files.remove("/tmp/d"))
    run(files.remove("/tmp/d", recursive=True))
    with pytest.raises(NotFoundError):
        run(files.stat("/tmp/d"))
    with pytest.raises(NotFoundError):
        run(files.remove("/tmp/d"))


def test_a_folder_survives_the_round_trip(box: tuple[Any, Any], tmp_path: Path) -> None:
    """Case 29."""
    sandbox, run = box
    tree = tmp_path / "tree"
    (tree / "empty").mkdir(parents=True)
    (tree / "sticky").mkdir()
    (tree / "sticky").chmod(0o1777)
    (tree / "a").write_text("a")
    (tree / "a").chmod(0o751)
    os.utime(tree / "a", (1_600_000_000, 1_600_000_000))
    os.link(tree / "a", tree / "hard")
    os.symlink("a", tree / "soft")
    os.symlink("t" * 4000, tree / "far")
    (tree / ("n" * 255)).write_text("long")
    (tree / "setuid").write_text("s")
    (tree / "setuid").chmod(0o4755)
    Path(os.fsdecode(os.fsencode(tree) + b"/odd\xff")).write_text("odd")
    os.mkfifo(tree / "fifo")
    run(sandbox.files.upload_dir(tree, "/tmp/tree"))
    back = tmp_path / "back"
    run(sandbox.files.download_dir("/tmp/tree", back))
    names = {p.name for p in back.iterdir()}
    assert names == {p.name for p in tree.iterdir()} - {"fifo"}
    assert (back / "a").stat().st_mode & 0o7777 == 0o751
    assert (back / "a").stat().st_mtime == 1_600_000_000
    assert (back / "a").stat().st_ino == (back / "hard").stat().st_ino
    assert os.readlink(back / "soft") == "a"
    assert os.readlink(back / "far") == "t" * 4000
    assert (back / "sticky").stat().st_mode & 0o7777 == 0o1777
    assert (back / "setuid").stat().st_mode & 0o7777 == 0o755
    assert (back / ("n" * 255)).read_text() == "long"
    shutil.rmtree(back)
    run(sandbox.exec("rm -rf /tmp/tree; mkdir /tmp/tree; ln -s /etc /tmp/tree/out"))
    from useshards import UnsafeArchiveError

    with pytest.raises(UnsafeArchiveError) as unsafe:
        run(sandbox.files.download_dir("/tmp/tree", back))
    assert unsafe.value.entry == "tree/out"
    with pytest.raises(NotADirectoryError):
        run(sandbox.files.download_dir("/etc/passwd", back))
    with pytest.raises(NotFoundError):
        run(sandbox.files.download_dir("/nowhere", back))


def test_a_daemon_that_dies_is_a_broken_connection(live: host.Host, connect: Callable[[], Any]) -> None:
    """Last: a server that is gone in the middle of a wait is told at once, and what the message says is true."""
    c = connect()
    sandbox = c.run(c.shard.create(IMAGE))
    command = c.run(sandbox.exec("echo kept; sleep 3; echo late", background=True))
    live.restart_daemon()
    with pytest.raises(ShardConnectionError):
        c.run(command.wait(timeout=60))
    c.run(command.reconnect())
    assert c.run(command.wait(timeout=60)).stdout == "kept\nlate\n"
    c.run(sandbox.remove(force=True))
