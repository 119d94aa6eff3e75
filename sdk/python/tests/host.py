"""A real daemon and a real `shard serve` over TLS, in a private root that nothing of is left when the tests end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]


def programs() -> Path:
    """Where the built programs are: SHARD_TEST_BIN, else bin/."""
    return Path(os.environ.get("SHARD_TEST_BIN") or REPO / "bin").resolve()


def missing() -> str:
    """Why live tests cannot run here, "" when they can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "only root can make sandboxes"
    shard = programs() / "shard"
    if not shard.exists():
        return f"{shard} is not built: run make"
    if subprocess.run([shard, "serve", "--help"], capture_output=True, check=False).returncode:
        return f"{shard} has no serve"
    if shutil.which("busybox") is None:
        return "there is no busybox to make an image of: install busybox-static"
    return ""


class Host:
    """One daemon with one provider and one server in front of it."""

    def __init__(self, provider: str) -> None:
        self.provider = provider
        self.root = tempfile.mkdtemp(prefix="sp", dir="/tmp")
        self.shard = str(programs() / "shard")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._log = open(os.path.join(self.root, "test.log"), "ab")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("SHARD_")}
        self.env["XDG_CONFIG_HOME"] = os.path.join(self.root, "no-config")
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def cli(self, *args: str) -> str:
        """Runs the command line against the daemon."""
        done = subprocess.run(
            [self.shard, "--root", self.root, *args], capture_output=True, text=True, env=self.env, check=False
        )
        if done.returncode:
            raise RuntimeError(f"shard {' '.join(args)}: {done.stderr}\n{self.log()}")
        return done.stdout

    def log(self) -> str:
        """What the programs said."""
        return Path(self._log.name).read_text(errors="replace")

    def _spawn(self, *args: str) -> subprocess.Popen[bytes]:
        command = [self.shard, "--root", self.root, *args]
        process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=self.env, start_new_session=True)
        self._processes.append(process)
        return process

    def _until(self, process: subprocess.Popen[bytes], ready: str) -> None:
        """Waits until something listens."""
        deadline = time.monotonic() + 60
        while True:
            try:
                if ready.startswith("/"):
                    with socket.socket(socket.AF_UNIX) as probe:
                        probe.connect(ready)
                else:
                    socket.create_connection(("127.0.0.1", int(ready)), 1).close()
                return
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the program does not listen:\n{self.log()}") from None
                time.sleep(0.02)

    def _start(self) -> None:
        self.daemon = self._spawn("daemon", "--provider", self.provider)
        self._until(self.daemon, os.path.join(self.root, "shard.sock"))
        self.api_key = json.loads(self.cli("tokens", "mint", "--name", "tests"))["token"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.server = self._spawn("serve", "--listen", f"127.0.0.1:{port}", "--tls-self-signed")
        self._until(self.server, str(port))
        self.remote = f"https://127.0.0.1:{port}"
        found = list(Path(self.root).rglob("ca.crt"))
        self.ca_file = str(found[0])

    def restart_daemon(self) -> None:
        """Kills the daemon and starts it again on the same root; sandboxes and commands go on meanwhile."""
        self.daemon.kill()
        self.daemon.wait()
        self._processes.remove(self.daemon)
        self.daemon = self._spawn("daemon", "--provider", self.provider)
        self._processes.insert(0, self._processes.pop())
        self._until(self.daemon, os.path.join(self.root, "shard.sock"))

    @contextmanager
    def frozen_server(self) -> Generator[None]:
        """`shard serve` keeps its connections and says nothing."""
        self.server.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.server.send_signal(signal.SIGCONT)

    def import_busybox(self) -> str:
        """An image of busybox alone; its reference."""
        tree = os.path.join(self.root, "busybox")
        for folder in ("bin", "etc", "etc/ssl/certs", "tmp", "root", "proc", "sys", "dev", "var"):
            os.makedirs(os.path.join(tree, folder))
        os.chmod(os.path.join(tree, "tmp"), 0o1777)
        shutil.copy(shutil.which("busybox") or "", os.path.join(tree, "bin/busybox"))
        applets = subprocess.run(["busybox", "--list"], capture_output=True, text=True, check=True).stdout.split()
        for applet in applets:
            if applet != "busybox":
                os.symlink("busybox", os.path.join(tree, "bin", applet))
        Path(tree, "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n")
        Path(tree, "etc/group").write_text("root:x:0:\nnobody:x:65534:\n")
        shutil.copy(self.ca_file, os.path.join(tree, "etc/ssl/certs/ca-certificates.crt"))  # secrets need a trust file
        self.cli("image", "import", "--env", "PATH=/bin", tree, "local/busybox:1")
        shutil.rmtree(tree)
        return "local/busybox:1"

    def import_python(self) -> str:
        """The Python image that the demo builds from the distribution's packages, under the name that the guide uses."""
        archive = subprocess.run([REPO / "demo/build-image"], capture_output=True, text=True, check=True).stdout.strip()
        self.cli("image", "import", archive, "python:3.12-slim")
        return "python:3.12-slim"

    def close(self) -> None:
        """Removes every sandbox, ends the programs, and leaves nothing."""
        try:
            for ref in self.cli("list", "--all", "-q").split():
                self.cli("remove", "--force", ref)
        except RuntimeError:
            pass
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()
        shutil.rmtree(self.root, ignore_errors=True)
