"""Carries out the calls of a scenario with either twin, and compares what comes of them."""

from __future__ import annotations

import asyncio
import json
import stat
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs

import useshards
from useshards import PolicyRule, PortForward, Restart, ShardError, TerminalSize

NATIVE = {
    "value": ValueError,
    "type": TypeError,
    "timeout": TimeoutError,
    "not_found": FileNotFoundError,
    "not_a_directory": NotADirectoryError,
}


class Calls:
    """The handles of one scenario, and the loop that runs the asyncio twin; for the other it is None."""

    def __init__(self, shard: Any, loop: asyncio.AbstractEventLoop | None, local: Path) -> None:
        self.loop = loop
        self.local = local
        self.handles: dict[str, Any] = {"shard": shard}
        self.collected: dict[str, bytearray] = {}

    def wait(self, value: Any) -> Any:
        if self.loop is not None and asyncio.iscoroutine(value):
            return self.loop.run_until_complete(value)
        return value

    def handle(self, name: str) -> Any:
        if name == "sandbox" and name not in self.handles:
            self.handles[name] = self.wait(self.handles["shard"].get("box"))
        return self.handles[name]

    def value(self, given: Any) -> Any:
        """An argument of the scenario as one of Python."""
        if isinstance(given, list):
            return [self.value(item) for item in given]
        if not isinstance(given, dict):
            return given
        for key, make in (("$size", TerminalSize), ("$rule", PolicyRule), ("$restart", Restart), ("$port", PortForward)):
            if key in given:
                return make(*given[key])
        if "$repeat" in given:
            return given["$repeat"][0] * given["$repeat"][1]
        if "$hex" in given:
            return bytes.fromhex(given["$hex"])
        if "$sandbox" in given:
            return self.handle("sandbox")
        if "$local" in given:
            return str(self.local / given["$local"])
        if "$collect" in given:
            return self.collected.setdefault(given["$collect"], bytearray()).extend
        return {key: self.value(item) for key, item in given.items()}

    def outcome(self, step: dict[str, Any]) -> tuple[Any, Exception | None]:
        """What a call returned or raised."""
        target, _, name = step["call"].partition(".")
        try:
            if target == "local":
                return self.locally(name, step), None
            found = self.handle(target)
            for part in name.split("."):
                found = getattr(found, part)
            if callable(found):
                args = [self.value(a) for a in step.get("args", [])]
                options = {k: self.value(v) for k, v in step.get("options", {}).items()}
                found = self.wait(found(*args, **options))
            if isinstance(found, (useshards.Follow, useshards.AsyncFollow)):
                found = self.gather(found)
        except (ShardError, ValueError, TypeError, OSError, RuntimeError) as exc:
            return None, exc
        if "as" in step:
            self.handles[step["as"]] = found
        return found, None

    def gather(self, follow: Any) -> Any:
        async def items() -> list[Any]:
            return [item async for item in follow]

        found = self.wait(items()) if self.loop is not None else list(follow)
        return b"".join(found) if found and isinstance(found[0], bytes) else found

    def locally(self, name: str, step: dict[str, Any]) -> Any:
        if name == "list":
            return sorted(p.name for p in self.local.iterdir())
        path = self.local / step["args"][0]
        if name == "read":
            return {"text": path.read_text(), "mode": f"{stat.S_IMODE(path.stat().st_mode):04o}"}
        path.write_text(step["args"][1])
        path.chmod(int(step["options"]["mode"], 8))
        return None

    def check(self, step: dict[str, Any]) -> None:
        """Carries out a call and fails when it does not end as the scenario says."""
        found, error = self.outcome(step)
        if "raises" in step:
            assert error is not None, f"{step['call']} returned {found!r}"
            self.check_error(step["raises"], error)
            return
        if error is not None:
            raise AssertionError(f"{step['call']} raised {error!r}") from error
        if "returns" in step:
            difference = differ(step["returns"], found)
            assert difference is None, f"{step['call']}: {difference}"
        for name, wanted in step.get("callbacks", {}).items():
            assert bytes(self.collected.get(name, b"")).hex() == wanted

    def check_error(self, wanted: Any, error: Exception) -> None:
        if isinstance(wanted, str):
            wanted = {"class": wanted}
        if "native" in wanted:
            assert isinstance(error, NATIVE[wanted["native"]]), repr(error)
            assert not isinstance(error, ShardError), repr(error)
            return
        assert type(error) is getattr(useshards, wanted["class"]), repr(error)
        for name in ("status", "code", "holders", "exit_code", "reason"):
            if name in wanted:
                assert getattr(error, name) == wanted[name], repr(error)
        for text in wanted.get("says", []):
            assert text in str(error), str(error)
        assert "test-key" not in str(error)


def differ(wanted: Any, found: Any) -> str | None:
    """How a value differs from what a scenario says of it; fields that it does not name may be anything."""
    if isinstance(wanted, dict) and "$hex" in wanted:
        return None if found == bytes.fromhex(wanted["$hex"]) else f"{found!r}"
    if isinstance(wanted, dict):
        for name, value in wanted.items():
            inner = differ(value, found[name] if isinstance(found, dict) else getattr(found, name))
            if inner is not None:
                return f".{name}{inner}"
        return None
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(found) != len(wanted):
            return f" is {found!r}"
        for at, (w, f) in enumerate(zip(wanted, found, strict=True)):
            inner = differ(w, f)
            if inner is not None:
                return f"[{at}]{inner}"
        return None
    if isinstance(found, datetime) and isinstance(wanted, str):
        wanted = datetime.fromisoformat(wanted)
    if attrs.has(type(found)) or wanted != found or (isinstance(wanted, bool) != isinstance(found, bool)):
        return f" is {found!r}, not {json.dumps(wanted, default=str)}"
    return None
