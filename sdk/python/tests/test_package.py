"""What the package promises as a whole: its names, its texts, its twins, its files."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import useshards

REPO = Path(__file__).resolve().parents[3]
PACKAGE = Path(useshards.__file__).parent


def public() -> list[tuple[str, Any]]:
    """Every public class and what of it is public, by name."""
    found: list[tuple[str, Any]] = []
    for name in useshards.__all__:
        value = getattr(useshards, name)
        if inspect.isclass(value):
            found.append((name, value))
            members = vars(value).items()
            found += [
                (f"{name}.{m}", v) for m, v in members if not m.startswith("_") and (callable(v) or isinstance(v, property))
            ]
    return found


@pytest.mark.parametrize(("name", "value"), public())
def test_every_public_name_is_explained_with_an_example(name: str, value: Any) -> None:
    text = inspect.getdoc(value) or ""
    assert ">>> " in text, f"{name} has no example"
    if inspect.isfunction(value):
        parameters = [p for p in inspect.signature(value).parameters if p != "self"]
        if len(parameters) > 1:
            for parameter in parameters:
                assert re.search(rf"\b{parameter}\b", text), f"{name} does not explain {parameter}"


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, v in public() if inspect.isfunction(v)])
def test_every_method_tells_its_errors_defaults_and_units(name: str, value: Any) -> None:
    text = inspect.getdoc(value) or ""
    if not name.endswith((".close", ".aclose", ".disconnect")):  # these never fail
        assert "Raises:" in text, f"{name} does not say what it raises"
    explained = dict(re.findall(r"^    ((?:\w+, )*\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE))
    for parameter in inspect.signature(value).parameters.values():
        about = next((t for names, t in explained.items() if parameter.name in names.split(", ")), "")
        if parameter.default is not inspect.Parameter.empty:
            assert "efault" in about or "None" in about, f"{name} does not tell the default of {parameter.name}"
        for part, unit in (("timeout", "econds"), ("_bytes", "bytes"), ("size", "bytes"), ("_mib", "MiB")):
            if parameter.name.endswith(part):
                assert unit in about, f"{name} does not tell the unit of {parameter.name}"


def test_twins_have_the_same_interface() -> None:
    for name in useshards.__all__:
        if not name.startswith("Async"):
            continue
        first, second = getattr(useshards, name), getattr(useshards, name.removeprefix("Async"))
        for member, value in vars(first).items():
            if member.startswith("_") or not inspect.isfunction(value):
                continue
            twin = getattr(second, "close" if member == "aclose" else member)
            plain = re.sub(r"\bAsync|typing\.Awaitable", "", str(inspect.signature(value)))
            assert plain == re.sub(r"\bAsync", "", str(inspect.signature(twin))), f"{name}.{member}"


def test_the_names_of_the_contract() -> None:
    for path in """
        Shard.create Shard.get Shard.list Shard.version Shard.capabilities Shard.providers Shard.ports Shard.close
        Policies.set Policies.get Policies.list Policies.remove Policies.attach Policies.detach
        Secrets.set Secrets.list Secrets.remove Secrets.grant Secrets.ungrant
        Snapshots.create Snapshots.list Snapshots.inspect Snapshots.remove
        Sandbox.inspect Sandbox.stop Sandbox.start Sandbox.pause Sandbox.resume Sandbox.fork Sandbox.remove
        Sandbox.exec Sandbox.run Sandbox.egress_log Sandbox.follow_egress_log Sandbox.id Sandbox.name
        Commands.list Commands.get Command.wait Command.kill Command.write_stdin Command.close_stdin Command.resize
        Command.inspect Command.disconnect Command.reconnect Processes.list Processes.get
        Process.name Process.wait Process.kill Process.logs Process.follow_logs Process.inspect
        Files.write Files.read Files.read_text Files.stat Files.list Files.mkdir Files.watch Files.remove Files.upload
        Files.download Files.upload_dir Files.download_dir Ports.add Ports.list Ports.remove
    """.split():
        owner, _, name = path.partition(".")
        assert hasattr(getattr(useshards, owner), name), path
    assert useshards.DEFAULT_OUTPUT_LIMIT == 8 << 20


def test_everything_says_where_it_is_imported_from() -> None:
    for name in useshards.__all__:
        value = getattr(useshards, name)
        if inspect.isclass(value) and issubclass(value, Exception):
            assert value.__module__ == "useshards"


def test_two_modules_import_httpx() -> None:
    importing = [
        p.name
        for p in PACKAGE.rglob("*.py")
        if re.search(r"^\s*(import|from) (httpx|httpcore|h11|anyio)", p.read_text(), re.MULTILINE)
    ]
    assert sorted(importing) == ["_http.py", "_net.py"]


@pytest.mark.parametrize("script", ["tools/unasync.py", "conformance/make.py"])
def test_generated_files_are_up_to_date(script: str) -> None:
    done = subprocess.run([sys.executable, REPO / script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(REPO / "sdk/python")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    (wheel,) = tmp_path.glob("*.whl")
    assert list(tmp_path.glob("*.tar.gz"))
    names = zipfile.ZipFile(wheel).namelist()
    sources = {f"useshards/{p.relative_to(PACKAGE)}" for p in [*PACKAGE.rglob("*.py"), PACKAGE / "py.typed"]}
    assert {n for n in names if ".dist-info/" not in n} == sources
    metadata = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert sorted(re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)) == [
        "attrs>=23.2",
        "httpx<1,>=0.27",
        "typing-extensions>=4.10",
    ]
