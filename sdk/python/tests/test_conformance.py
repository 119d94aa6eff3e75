"""The vectors of conformance/, with both twins."""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calls import Calls, differ
from scripted import CONFORMANCE, ScriptedServer

import useshards
from useshards import ConfigurationError, InvalidRequestError, ProtocolError, UnsafeArchiveError, _models
from useshards._archive import unpack
from useshards._async._files import _octal
from useshards._async._sandbox import argv, environ
from useshards._async._transport import read, segment
from useshards._errors import detail_error, refusal
from useshards._frames import Decoder, Message, accept_of, encode
from useshards._settings import check_key, check_remote, resolve


def vectors(name: str) -> Any:
    return json.loads((CONFORMANCE / name).read_text())


def unpacked(pieces: list[Any]) -> bytes:
    return b"".join(bytes.fromhex(p) if isinstance(p, str) else bytes.fromhex(p[0]) * p[1] for p in pieces)


# --- scenarios -----------------------------------------------------------------------------------------------------

SCENARIOS = [
    (path.stem, scenario)
    for path in sorted((CONFORMANCE / "scenarios").glob("*.json"))
    if path.stem != "box"
    for scenario in json.loads(path.read_text())["scenarios"]
    if "python" in scenario.get("only", ["python"])
]


def play(client: Callable[..., Any], scenario: dict[str, Any], local: Path, **how: Any) -> ScriptedServer:
    options = {k: scenario[k] for k in ("loose_query",) if k in scenario}
    with ScriptedServer(scenario["exchanges"], **options, **how) as server:
        c = client(server.remote, timeout=scenario.get("timeout", 20))
        calls = Calls(c.shard, c.loop, local)
        for step in scenario["calls"]:
            calls.check(step)
        c.run(c.shard.aclose() if c.loop else c.shard.close())
    assert not server.problems, server.problems
    assert not server.unused(), server.unused()
    return server


@pytest.mark.filterwarnings("ignore:the remote is http")
@pytest.mark.parametrize(("group", "scenario"), [pytest.param(g, s, id=f"{g}: {s['about']}") for g, s in SCENARIOS])
def test_scenario(client: Callable[..., Any], group: str, scenario: dict[str, Any], tmp_path: Path) -> None:
    play(client, scenario, tmp_path)
    if not any("ms" in key for e in scenario["exchanges"] for key in e):
        for path in tmp_path.iterdir():
            path.unlink()
        play(client, scenario, tmp_path, bytewise=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the remote is http")
@pytest.mark.parametrize("scenario", [pytest.param(s, id=s["about"]) for _, s in SCENARIOS if "cut" in s])
def test_cut_at_every_byte(client: Callable[..., Any], scenario: dict[str, Any], tmp_path: Path) -> None:
    quick = {**scenario, "exchanges": [without_pauses(e) for e in scenario["exchanges"]]}
    whole = play(client, quick, tmp_path)
    for cut in range(whole.sent):
        with ScriptedServer(quick["exchanges"], cut=cut) as server:
            c = client(server.remote, timeout=20)
            calls = Calls(c.shard, c.loop, tmp_path)
            outcomes = []
            for step in quick["calls"]:
                found, error = calls.outcome(step)
                outcomes.append((step, found, error))
                if error is not None:
                    break
            c.run(c.shard.aclose() if c.loop else c.shard.close())
        step, found, error = outcomes[-1]
        if error is None:
            assert cut >= whole.essential, f"cut after {cut} of {whole.essential} bytes, and it returned {found!r}"
            assert differ(step.get("returns"), found) is None
        else:
            assert cut < whole.essential, f"cut after {cut} of {whole.essential} bytes, and it raised {error!r}"
            calls.check_error(scenario["cut"]["raises"], error)


def without_pauses(exchange: dict[str, Any]) -> dict[str, Any]:
    if "stream" not in exchange:
        return exchange
    return {**exchange, "stream": [s for s in exchange["stream"] if "pause_ms" not in s]}


# --- errors --------------------------------------------------------------------------------------------------------


def check_error(error: Exception, wanted: dict[str, Any]) -> None:
    assert type(error) is getattr(useshards, wanted["class"])
    for name in ("status", "code", "exit_code", "reason"):
        if name in wanted and hasattr(error, name):
            assert getattr(error, name) == wanted[name]
    if isinstance(error, useshards.APIError):
        assert error.holders == wanted.get("holders", [])
    assert wanted.get("says", "") in str(error)


@pytest.mark.parametrize("vector", vectors("errors.json")["answers"])
def test_errors_of_answers(vector: dict[str, Any]) -> None:
    body = json.dumps(vector["body"]) if "body" in vector else vector["text"]
    error = refusal(vector["status"], body.encode())
    check_error(error, vector)
    if "body" in vector and "text" in vector:
        assert str(error) == vector["text"]


def test_a_foreign_body_is_quoted() -> None:
    vector = vectors("errors.json")["quoted"]
    text = str(refusal(vector["status"], vector["unit"].encode() * vector["count"]))
    assert text.count(vector["unit"]) == vector["quotes"]


@pytest.mark.parametrize("vector", vectors("errors.json")["heads"])
def test_errors_of_heads(vector: dict[str, Any]) -> None:
    check_error(refusal(vector["status"], b"", head=True), {**vector, "code": ""})


@pytest.mark.parametrize("vector", vectors("errors.json")["streams"])
def test_errors_of_streams(vector: dict[str, Any]) -> None:
    check_error(detail_error(None, vector["body"]["error"]), vector)


# --- frames --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", [pytest.param(v, id=v["about"]) for v in vectors("frames.json")["received"]])
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_frames_received(vector: dict[str, Any], step: int) -> None:
    data = unpacked(vector["bytes"])
    if step == 1 and len(data) > 1 << 17:
        step = 997
    decoder, messages = Decoder(), []
    for at in range(0, len(data), step):
        decoder.feed(data[at : at + step])
        while (message := decoder.next()) is not None:
            messages.append(message)
    assert messages == [Message(m["opcode"], unpacked(m["payload"])) for m in vector["messages"]]


@pytest.mark.parametrize("vector", [pytest.param(v, id=v["about"]) for v in vectors("frames.json")["refused"]])
def test_frames_refused(vector: dict[str, Any]) -> None:
    decoder = Decoder()
    decoder.feed(unpacked(vector["bytes"]))
    with pytest.raises(ProtocolError):
        while decoder.next() is not None:
            pass


@pytest.mark.parametrize("vector", [pytest.param(v, id=v["about"]) for v in vectors("frames.json")["sent"]])
def test_frames_sent(vector: dict[str, Any]) -> None:
    got = encode(vector["opcode"], unpacked(vector["payload"]), bytes.fromhex(vector["mask"]))
    assert got == unpacked(vector["bytes"])


def test_handshakes() -> None:
    for vector in vectors("frames.json")["handshakes"]:
        assert accept_of(vector["key"]) == vector["accept"]


# --- inputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", vectors("inputs.json")["remotes"])
def test_remotes(vector: dict[str, Any]) -> None:
    if "is" in vector:
        assert check_remote(vector["value"]) == vector["is"]
    else:
        with pytest.raises(ConfigurationError, match=r"^remote: "):
            check_remote(vector["value"])


@pytest.mark.parametrize("vector", vectors("inputs.json")["api_keys"])
def test_api_keys(vector: dict[str, Any]) -> None:
    if "accepted" in vector:
        assert check_key(vector["value"]) == vector["value"]
        return
    with pytest.raises(ConfigurationError) as error:
        check_key(vector["value"])
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("vector", [pytest.param(v, id=v["about"]) for v in vectors("inputs.json")["settings"]])
def test_settings(vector: dict[str, Any], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    for name, value in vector["env"].items():
        monkeypatch.setenv(name, value)
    given = {"remote": None, "api_key": None, "ca_file": None, **vector["args"]}
    if vector.get("refused"):
        with pytest.raises(ConfigurationError):
            resolve(**given, timeout=60, stacklevel=1)
        return
    if vector.get("warns"):
        with pytest.warns(UserWarning, match="unencrypted"):
            assert resolve(**given, timeout=60, stacklevel=1).remote == vector["remote"]
        return
    settings = resolve(**given, timeout=60, stacklevel=1)
    assert settings.remote == vector["remote"]
    assert settings.api_key == "k"
    assert "'k'" not in repr(settings)
    assert not recwarn.list


@pytest.mark.parametrize("vector", vectors("inputs.json")["segments"])
def test_segments(vector: dict[str, Any]) -> None:
    if "path" in vector:
        assert segment(vector["value"], "sandbox") == vector["path"]
    else:
        with pytest.raises(ValueError, match="empty"):
            segment(vector["value"], "sandbox")


@pytest.mark.parametrize("vector", vectors("inputs.json")["commands"])
def test_commands(vector: dict[str, Any]) -> None:
    if "argv" in vector:
        assert argv(vector["value"]) == vector["argv"]
    else:
        with pytest.raises(ValueError, match="empty"):
            argv(vector["value"])


@pytest.mark.parametrize("vector", vectors("inputs.json")["env"])
def test_env(vector: dict[str, Any]) -> None:
    if "entries" in vector:
        assert environ(vector["value"]) == vector["entries"]
    else:
        with pytest.raises(InvalidRequestError):
            environ(vector["value"])


@pytest.mark.parametrize("vector", vectors("inputs.json")["modes"])
def test_modes(vector: dict[str, Any]) -> None:
    if "octal" in vector:
        assert _octal(vector["value"]) == vector["octal"]
    else:
        with pytest.raises(ValueError, match="mode"):
            _octal(vector["value"])


@pytest.mark.parametrize("vector", vectors("inputs.json")["ports"])
def test_ports(vector: dict[str, Any]) -> None:
    if "accepted" in vector:
        useshards.PortForward(vector["value"], vector["value"])
    else:
        with pytest.raises(ValueError, match="port"):
            useshards.PortForward(vector["value"], 1)


# --- records -------------------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[Any], Any]] = {
    "sandbox": _models.sandbox_info,
    "command": _models.command_info,
    "process": _models.process_info,
    "port": _models.port,
    "file_entry": _models.file_entry,
    "file_event": _models.file_event,
    "provider": _models.provider_info,
    "snapshot": _models.snapshot,
    "secret": _models.secret_info,
    "policy": _models.policy,
    "egress_decision": _models.egress_decision,
    "version": _models.version,
    "capabilities": _models.capabilities,
}


@pytest.mark.parametrize("vector", [pytest.param(v, id=v["about"]) for v in vectors("records.json")["accepted"]])
def test_records(vector: dict[str, Any]) -> None:
    found = read(vector["wire"], READERS[vector["kind"]], "it")
    assert differ(vector["fields"], found) is None


@pytest.mark.parametrize("vector", [pytest.param(v, id=v["about"]) for v in vectors("records.json")["refused"]])
def test_records_refused(vector: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        read(vector["wire"], READERS[vector["kind"]], "it")


# --- archives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "vector"), list(vectors("tar/index.json").items()))
def test_archives(name: str, vector: dict[str, Any], tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("untouched")
    target = tmp_path / "target"
    tar = io.BytesIO((CONFORMANCE / f"tar/{name}.tar").read_bytes())
    if vector.get("refused"):
        with pytest.raises(UnsafeArchiveError):
            unpack(tar, str(target))
    else:
        unpack(tar, str(target))
        for path, wanted in vector["holds"].items():
            check_landed(target / path, wanted)
    assert canary.read_text() == "untouched"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["canary", "target"]
    for folder, folders, files in os.walk(target):
        for found in folders + files:
            assert not found.startswith(".shard-")
            path = Path(folder, found)
            if path.is_symlink():
                assert not os.path.isabs(os.readlink(path))
                resolved = os.path.realpath(path)
                assert resolved == str(target) or resolved.startswith(f"{target}/"), f"{path} leads out"


def check_landed(path: Path, wanted: dict[str, Any]) -> None:
    if "link" in wanted:
        assert os.readlink(path) == wanted["link"]
    if "data" in wanted:
        assert path.read_text() == wanted["data"]
    if "dir" in wanted:
        assert path.is_dir()
    if "mode" in wanted:
        assert f"{stat.S_IMODE(path.lstat().st_mode):04o}" == wanted["mode"]
