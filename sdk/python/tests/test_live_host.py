"""Against a real `shard serve`, what belongs to the host: watches, providers, processes, ports, policies, secrets."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import host
import pytest

from useshards import (
    APIError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    PolicyRule,
    PortForward,
    Restart,
    UnsupportedError,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
IMAGE = "local/busybox:1"


def take(c: Any, follow: Any) -> Any:
    """The next item of a follow, None at its end."""
    if c.loop is None:
        return next(follow, None)

    async def one() -> Any:
        return await anext(follow, None)

    return c.run(one())


def rest(c: Any, follow: Any) -> list[Any]:
    """Everything up to the end of a follow."""
    if c.loop is None:
        return list(follow)

    async def gather() -> list[Any]:
        return [item async for item in follow]

    found: list[Any] = c.run(gather())
    return found


@pytest.mark.quick
def test_watching_a_directory(connect: Callable[[], Any], box: tuple[Any, Any]) -> None:
    c = connect()
    sandbox = c.run(c.shard.get(box[0].id))
    c.run(sandbox.files.mkdir("/root/watched/d", parents=True))
    changes = sandbox.files.watch("/root/watched")
    c.run(changes.__aenter__() if c.loop else changes.__enter__())
    c.run(sandbox.exec("cd /root/watched; echo 1 >a; mv a d/b; rm -r d; rmdir ../watched"))
    events = [e for e in rest(c, changes) if e.type != "modified"]
    assert [(e.type, e.path.removeprefix("/root/watched"), e.moved_from, e.is_dir) for e in events] == [
        ("created", "/a", None, False),
        ("moved", "/d/b", "/root/watched/a", False),
        ("deleted", "/d/b", None, False),
        ("deleted", "/d", None, True),
        ("deleted", "", None, True),
    ]
    assert all(abs(e.time.timestamp() - time.time()) < 60 for e in events)
    c.run(sandbox.files.mkdir("/root/flat/d", parents=True))
    flat = sandbox.files.watch("/root/flat", recursive=False)
    c.run(flat.__aenter__() if c.loop else flat.__enter__())
    c.run(sandbox.exec("cd /root/flat; echo 1 >d/below; echo 1 >$(printf 'odd\\377')"))
    found = take(c, flat)
    while found.path == "/root/flat/d":  # its times changed
        found = take(c, flat)
    assert found.path == "/root/flat/odd\udcff"
    c.run(flat.aclose() if c.loop else flat.close())
    assert take(c, flat) is None
    with pytest.raises(NotFoundError):
        take(c, sandbox.files.watch("/nowhere"))
    with pytest.raises(InvalidRequestError):
        take(c, sandbox.files.watch("/etc/passwd"))


def test_providers(live: host.Host, connect: Callable[[], Any]) -> None:
    c = connect()
    providers = {p.name: p for p in c.run(c.shard.providers())}
    assert providers[live.provider].available
    assert providers[live.provider].capabilities.create
    assert sum(p.default for p in providers.values()) == 1
    sandbox = c.run(c.shard.create(IMAGE, provider=live.provider))
    try:
        assert sandbox.info.provider == live.provider
    finally:
        c.run(sandbox.remove(force=True))
    with pytest.raises(APIError):
        c.run(c.shard.create(IMAGE, provider="nosuch"))


@pytest.mark.quick
def test_named_processes(connect: Callable[[], Any], box: tuple[Any, Any]) -> None:
    c = connect()
    sandbox = c.run(c.shard.get(box[0].id))
    ticker = c.run(sandbox.run("for i in 1 2 3; do echo tick $i; done", name="ticker", restart=Restart("no")))
    ended = c.run(ticker.wait(timeout=30))
    assert ended.status.exit is not None
    assert (ended.status.state, ended.status.exit.code) == ("exited", 0)
    assert c.run(ticker.logs()) == "tick 1\ntick 2\ntick 3\n"
    assert b"".join(rest(c, ticker.follow_logs())) == b"tick 1\ntick 2\ntick 3\n"
    server = c.run(sandbox.run(["sh", "-c", "echo up; exec sleep 1000"], name="server"))
    with pytest.raises(ConflictError) as taken:
        c.run(sandbox.run(["true"], name="server"))
    assert taken.value.code == "name_taken"
    logs = server.follow_logs()
    assert take(c, logs) == b"up\n"
    with pytest.raises(TimeoutError):
        c.run(server.wait(timeout=0.3))
    assert c.run(server.inspect()).status.state == "running"
    found = c.run(sandbox.processes.get("server"))
    c.run(found.kill(force=True))
    assert take(c, logs) is None
    assert c.run(server.wait(timeout=30)).killed
    assert [p.name for p in c.run(sandbox.processes.list())] == ["ticker", "server"]
    with pytest.raises(NotFoundError) as unknown:
        c.run(sandbox.processes.get("nosuch"))
    assert unknown.value.code == "no_process"


@pytest.mark.quick
def test_pause_and_resume(connect: Callable[[], Any], box: tuple[Any, Any]) -> None:
    """Memory goes on where it stood, commands end and say why; a provider that cannot says so and changes nothing."""
    c = connect()
    sandbox = c.run(c.shard.get(box[0].id))
    if not c.run(c.shard.capabilities()).pause:
        for verb in (sandbox.pause, sandbox.resume):
            with pytest.raises(UnsupportedError):
                c.run(verb())
        assert c.run(sandbox.inspect()).state == "running"
        return
    counter = c.run(sandbox.run("n=0; while :; do n=$((n + 1)); echo $n; sleep 0.02; done", name="counter"))
    logs = counter.follow_logs()
    assert take(c, logs).startswith(b"1\n")
    command = c.run(sandbox.exec("echo held; sleep 1000", background=True))
    started = sandbox.info.started_at
    c.run(sandbox.pause())
    assert (sandbox.info.state, sandbox.info.started_at) == ("paused", started)
    with pytest.raises(ConflictError, match="the sandbox was paused while the command ran") as ended:
        c.run(command.wait(timeout=60))
    assert ended.value.code == "sandbox_not_running"
    for verb in (lambda: sandbox.exec("true"), sandbox.pause, sandbox.start, sandbox.remove):
        with pytest.raises(ConflictError):
            c.run(verb())
    counted = len(c.run(counter.logs()).splitlines())
    c.run(sandbox.resume())
    assert (sandbox.info.state, sandbox.info.started_at) == ("running", started)
    with pytest.raises(ConflictError) as running:
        c.run(sandbox.resume())
    assert running.value.code == "sandbox_not_paused"
    assert c.run(sandbox.exec("echo on")).stdout == "on\n"
    deadline = time.monotonic() + 60
    while len(c.run(counter.logs()).splitlines()) <= counted:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    status = c.run(counter.inspect()).status
    assert (status.state, status.restarts) == ("running", 0)
    c.run(counter.kill(force=True))
    lines = c.run(counter.logs()).splitlines()
    assert lines == [str(n) for n in range(1, len(lines) + 1)]
    assert b"".join(rest(c, logs)).decode().splitlines()[-1] == lines[-1]
    c.run(sandbox.pause())  # and one that is paused can be removed by force


def test_ports(connect: Callable[[], Any], box: tuple[Any, Any]) -> None:
    c = connect()
    if not c.run(c.shard.capabilities()).port:
        pytest.skip("this provider forwards no ports")
    sandbox = c.run(c.shard.get(box[0].id))
    c.run(sandbox.run("while :; do echo hello | nc -l -p 8000; done", name="greeter"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    port = c.run(sandbox.ports.add(number, 8000))
    assert (port.guest_port, port.listening, port.public) == (8000, True, False)
    said = b""
    for _ in range(200):
        try:
            with socket.create_connection(("127.0.0.1", number), 10) as connection:
                said = connection.recv(100)
        except OSError:
            pass
        if said:
            break
        time.sleep(0.05)
    assert said == b"hello\n"
    assert [p.host_port for p in c.run(sandbox.ports.list())] == [number]
    assert (number, sandbox.id) in [(p.host_port, p.sandbox) for p in c.run(c.shard.ports())]
    with pytest.raises(ConflictError):
        c.run(c.shard.create(IMAGE, ports=[PortForward(number, 8000)]))
    c.run(sandbox.ports.remove(number))
    assert c.run(sandbox.ports.list()) == []


def test_policies_and_the_egress_log(connect: Callable[[], Any]) -> None:
    c = connect()
    policies = c.shard.policies
    rules = [PolicyRule("deny", "blocked.example"), PolicyRule("allow", "192.0.2.0/24 tcp:443")]
    assert c.run(policies.set("narrow", rules)).rules == rules
    sandbox = c.run(c.shard.create(IMAGE, policy="narrow"))
    try:
        assert sandbox.info.policy == "narrow"
        assert c.run(policies.get("narrow")).holders == [sandbox.id]
        assert "narrow" in [p.name for p in c.run(policies.list())]
        with pytest.raises(ConflictError) as held:
            c.run(policies.remove("narrow"))
        assert held.value.code == "in_use"
        assert len(held.value.holders) == 1
        follow = sandbox.follow_egress_log()
        c.run(sandbox.exec("nslookup blocked.example; true"))
        decision = take(c, follow)
        assert (decision.source, decision.verdict) == ("dns", "deny")
        assert "blocked.example" in str(decision.host)
        assert [d for d in c.run(sandbox.egress_log()) if d.verdict == "deny"]
        c.run(sandbox.stop())
        rest(c, follow)
        assert c.run(policies.detach(sandbox)).policy is None
        assert c.run(policies.attach(sandbox, "narrow")).policy == "narrow"
    finally:
        c.run(sandbox.remove(force=True))
        c.run(policies.remove("narrow"))
    with pytest.raises(NotFoundError):
        c.run(policies.get("narrow"))
    with pytest.raises(InvalidRequestError):
        c.run(policies.set("narrow", [PolicyRule("deny", "no rule at all")]))


@pytest.mark.quick
def test_secrets(connect: Callable[[], Any]) -> None:
    """A sandbox has the placeholder, the daemon the value, and what is held cannot be taken away by accident."""
    c = connect()
    secrets, value = c.shard.secrets, "the-real-value-of-the-token"
    with pytest.raises(InvalidRequestError):
        c.run(secrets.set("API_TOKEN", value=value))  # the first time it needs destinations
    stored = c.run(secrets.set("API_TOKEN", value=value, destinations=["api.example.com", "*.example.net"]))
    sandbox = None
    try:
        assert (stored.name, stored.placeholder) == ("API_TOKEN", "mock-API_TOKEN")
        assert sorted(stored.destinations) == ["*.example.net", "api.example.com"]
        again = c.run(secrets.set("API_TOKEN", value=value + "-2"))
        assert (again.destinations, again.placeholder) == (stored.destinations, stored.placeholder)
        assert again.updated_at >= stored.updated_at
        for name, options in (
            ("lower-case", {"value": value, "destinations": ["a.example.com"]}),
            ("OTHER", {"value": value, "destinations": ["*"]}),
            ("OTHER", {"value": "", "destinations": ["a.example.com"]}),
            ("OTHER", {"value": value, "destinations": ["a.example.com"], "placeholder": "short"}),
            ("OTHER", {"value": value, "destinations": ["a.example.com"], "placeholder": "mock-API_TOKEN"}),
        ):
            with pytest.raises((InvalidRequestError, ConflictError)) as refused:
                c.run(secrets.set(name, **options))
            assert value not in str(refused.value)
        found = c.run(secrets.list())
        assert ([s.name for s in found], found.warnings) == (["API_TOKEN"], [])
        assert value not in repr(found)

        with pytest.raises(InvalidRequestError):
            c.run(c.shard.create(IMAGE, secrets=["NO_SUCH"]))
        with pytest.raises(InvalidRequestError):
            c.run(c.shard.create(IMAGE, secrets=["API_TOKEN"], env={"API_TOKEN": "mine"}))
        sandbox = c.run(c.shard.create(IMAGE, secrets=["API_TOKEN"]))
        assert (sandbox.info.state, sandbox.info.secrets) == ("running", ["API_TOKEN"])
        told = c.run(sandbox.exec("echo $API_TOKEN; env; cat $SSL_CERT_FILE")).stdout
        assert told.startswith("mock-API_TOKEN\n")
        assert "BEGIN CERTIFICATE" in told
        assert value not in told

        with pytest.raises(ConflictError) as conflict:
            c.run(secrets.set("API_TOKEN", value=value, placeholder="another-placeholder"))
        assert conflict.value.code == "in_use"
        with pytest.raises(ConflictError) as conflict:
            c.run(secrets.remove("API_TOKEN"))
        assert (conflict.value.code, conflict.value.holders) == ("in_use", [sandbox.id])
        for change in (secrets.ungrant, secrets.grant):
            with pytest.raises(ConflictError) as conflict:
                c.run(change(sandbox, "API_TOKEN"))
            assert conflict.value.code == "sandbox_live"
        c.run(sandbox.stop())
        assert c.run(secrets.ungrant(sandbox, "API_TOKEN")).secrets == []
        for _ in range(2):
            assert c.run(secrets.grant(sandbox.id, "API_TOKEN")).secrets == ["API_TOKEN"]
        with pytest.raises(NotFoundError):
            c.run(secrets.grant(sandbox, "NO_SUCH"))
        c.run(sandbox.start())
        assert c.run(sandbox.exec("echo $API_TOKEN")).stdout == "mock-API_TOKEN\n"
        c.run(secrets.remove("API_TOKEN", force=True))
        assert not c.run(secrets.list()).secrets
        with pytest.raises(NotFoundError):
            c.run(secrets.remove("API_TOKEN"))
    finally:
        if sandbox is not None:
            c.run(sandbox.remove(force=True))
        if c.run(secrets.list()).secrets:
            c.run(secrets.remove("API_TOKEN", force=True))
