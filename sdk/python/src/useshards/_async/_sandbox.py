"""Sandboxes: the handle, its ports, and the files it reaches."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from .._errors import InvalidRequestError
from .._models import (
    CommandResult,
    EgressDecision,
    Port,
    PortForward,
    Restart,
    SandboxInfo,
    TerminalSize,
    egress_decision,
    port,
    process_info,
    sandbox_info,
)
from .._output import DEFAULT_OUTPUT_LIMIT
from ._command import AsyncCommand, AsyncCommands, AsyncOutputCallback, AsyncSink, attach, run_foreground, start
from ._command import background as _background
from ._files import AsyncFiles
from ._process import AsyncEgressFollow, AsyncProcess, AsyncProcesses
from ._transport import AsyncTransport, read, segment


def argv(command: str | Sequence[str]) -> list[str]:
    """A string runs under a shell, a list as it is."""
    if isinstance(command, str):
        return ["/bin/sh", "-c", command]
    if isinstance(command, (bytes, bytearray)):
        raise TypeError("command must be a string or a sequence of strings")
    words = list(command)
    if not all(isinstance(word, str) for word in words):
        raise TypeError("command must be a string or a sequence of strings")
    if not words:
        raise ValueError("command is empty: give at least the program")
    return words


def environ(env: Mapping[str, str] | None) -> list[str]:
    """Variables in the form of the wire. A name with "=" would arrive as another one, so it is refused here."""
    entries = []
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError("env must map strings to strings")
        if not name or "=" in name or "\0" in name:
            raise InvalidRequestError(400, "invalid_request", f'env: {name!r} is no name: it is empty or holds "=" or a NUL')
        entries.append(f"{name}={value}")
    return entries


def present(**fields: Any) -> dict[str, Any]:
    """The fields of a request that were given."""
    return {name: value for name, value in fields.items() if value is not None and value != []}


class AsyncPorts:
    """The host ports that are forwarded to a sandbox.

    Example:
        >>> forward = await sandbox.ports.add(9000, 8000)
        >>> print(forward.listening, forward.reachable_on)
    """

    def __init__(self, transport: AsyncTransport, sandbox_id: str) -> None:
        self._transport = transport
        self._path = f"/v0/sandboxes/{segment(sandbox_id, 'sandbox')}/ports"

    async def add(self, host_port: int, guest_port: int, public: bool = False) -> Port:
        """Forwards a host port to a port on the sandbox's 127.0.0.1, or changes the forward that it has.

        Args:
            host_port: 1 to 65535. The host listens while the sandbox runs; the forward outlives a stop.
            guest_port: 1 to 65535.
            public: Listen on 0.0.0.0 instead of 127.0.0.1. Default False.

        Raises:
            ValueError: A port is out of range.
            ConflictError: The host port is taken (code "in_use").
            UnsupportedError: The provider forwards no ports.

        Example:
            >>> (await sandbox.ports.add(9000, 8000)).address
            '127.0.0.1'
        """
        asked = PortForward(host_port, guest_port, public)
        body = {"guest_port": asked.guest_port, "public": asked.public}
        return read(await self._transport.call("PUT", f"{self._path}/{asked.host_port}", body=body), port, "a port")

    async def list(self) -> list[Port]:
        """The sandbox's forwards in the order of their host ports.

        Raises:
            NotFoundError: There is no such sandbox.

        Example:
            >>> [p.host_port for p in await sandbox.ports.list()]
            [9000]
        """
        found, _ = await self._transport.pages(self._path, "ports")
        return [read(item, port, "a port") for item in found]

    async def remove(self, host_port: int) -> None:
        """Ends a forward and the connections that it carries.

        Raises:
            ValueError: The port is out of range.
            NotFoundError: The sandbox has no such forward.

        Example:
            >>> await sandbox.ports.remove(9000)
        """
        asked = PortForward(host_port, 1)
        await self._transport.call("DELETE", f"{self._path}/{asked.host_port}")


class AsyncSandbox:
    """A sandbox: shard.create(), get(), list() and fork() return it. It outlives the handle and the program.

    Attributes:
        info: The record that the last call on this handle returned.
        commands: The commands that the daemon holds for it.
        processes: Its named processes.
        files: Its files, while it runs.
        ports: The host ports that are forwarded to it.

    Example:
        >>> sandbox = await shard.create("alpine:3.20", memory_mib=512)
        >>> print((await sandbox.exec("uname")).stdout)
        Linux
        >>> await sandbox.remove(force=True)
    """

    def __init__(self, transport: AsyncTransport, info: SandboxInfo) -> None:
        self._transport = transport
        self.info = info
        self.commands = AsyncCommands(transport, info.id)
        self.processes = AsyncProcesses(transport, info.id)
        self.files = AsyncFiles(transport, info.id)
        self.ports = AsyncPorts(transport, info.id)

    def __repr__(self) -> str:
        return f"<AsyncSandbox {self.name or self.id}: {self.info.state}>"

    @property
    def id(self) -> str:
        """Its generated id.

        Example:
            >>> sandbox.id
            'amber-acorn-0a1b'
        """
        return self.info.id

    @property
    def name(self) -> str | None:
        """Its name, None when it has none.

        Example:
            >>> sandbox.name
            'demo'
        """
        return self.info.name

    def _path(self, verb: str = "") -> str:
        path = f"/v0/sandboxes/{segment(self.id, 'sandbox')}"
        return f"{path}/{verb}" if verb else path

    async def _verb(self, verb: str) -> None:
        answer = await self._transport.call("POST", self._path(verb), waits=True)
        self.info = read(answer, sandbox_info, "a sandbox")

    async def inspect(self) -> SandboxInfo:
        """Reads the sandbox's record again, with the egress rules in force.

        Raises:
            NotFoundError: It is gone.

        Example:
            >>> (await sandbox.inspect()).state
            'running'
        """
        self.info = read(await self._transport.call("GET", self._path()), sandbox_info, "a sandbox")
        return self.info

    async def stop(self) -> None:
        """Stops the sandbox and keeps its files. Each process has 30 s to end.

        Raises:
            ConflictError: It does not run or has failed.

        Example:
            >>> await sandbox.stop()
        """
        await self._verb("stop")

    async def start(self) -> None:
        """Starts a stopped sandbox with its files.

        Raises:
            ConflictError: It is not stopped or has failed.

        Example:
            >>> await sandbox.start()
        """
        await self._verb("start")

    async def pause(self) -> None:
        """Saves the sandbox's memory and files to disk and suspends it.

        Named processes go on at `resume()`. Commands that run end, with a ConflictError for who waits for them, and
        connections to forwarded ports are closed.

        Raises:
            UnsupportedError: The provider cannot pause, or not what a program in the sandbox holds; it runs on.
            ConflictError: It does not run.

        Example:
            >>> await sandbox.pause()
        """
        await self._verb("pause")

    async def resume(self) -> None:
        """Continues a paused sandbox from where it paused. When that fails it stays paused.

        Raises:
            UnsupportedError: The provider cannot pause, or is no longer the version that paused it.
            ConflictError: It is not paused.

        Example:
            >>> await sandbox.resume()
        """
        await self._verb("resume")

    async def fork(self, *, name: str | None = None) -> AsyncSandbox:
        """Makes a new running sandbox from this one's memory and files.

        Args:
            name: The copy's name, none by default.

        Raises:
            UnsupportedError: The provider cannot fork.
            ConflictError: The sandbox does not run, or the name is taken.

        Example:
            >>> copy = await sandbox.fork(name="demo-copy")
        """
        answer = await self._transport.call("POST", self._path("fork"), body=present(name=name), waits=True)
        return AsyncSandbox(self._transport, read(answer, sandbox_info, "a sandbox"))

    async def remove(self, *, force: bool = False) -> None:
        """Deletes the sandbox and its files.

        Args:
            force: Stop a running or paused sandbox first. Default False.

        Raises:
            ConflictError: It runs or is paused and `force` is not given.
            NotFoundError: It is gone.

        Example:
            >>> await sandbox.remove(force=True)
        """
        query = {"force": "true"} if force else None
        await self._transport.call("DELETE", self._path(), query=query, waits=True)

    @overload
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        tty: bool | TerminalSize = False,
        on_stdout: AsyncOutputCallback | None = None,
        on_stderr: AsyncOutputCallback | None = None,
        output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT,
        background: Literal[False] = False,
    ) -> CommandResult: ...

    @overload
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
        stdin: bool = False,
        tty: bool | TerminalSize = False,
        on_stdout: AsyncOutputCallback | None = None,
        on_stderr: AsyncOutputCallback | None = None,
        output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT,
        background: Literal[True],
    ) -> AsyncCommand: ...

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
        stdin: str | bytes | bool | None = None,
        tty: bool | TerminalSize = False,
        on_stdout: AsyncOutputCallback | None = None,
        on_stderr: AsyncOutputCallback | None = None,
        output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT,
        background: bool = False,
    ) -> CommandResult | AsyncCommand:
        """Runs a command and returns how it ended, or its handle as soon as it runs.

        Leaving early, by a cancel or an error, never ends the command.

        Args:
            command: A string runs under /bin/sh -c; a list runs as it is, without a shell.
            env: Variables added to the sandbox's environment; none by default.
            workdir: The working directory; the sandbox's by default.
            user: A user name or uid in the sandbox; the sandbox's by default.
            stdin: The whole input as text or bytes; nothing by default. With `background` a bool: True keeps the
                input open for write_stdin().
            tty: True, or a TerminalSize: run the command on a terminal, whose output is all stdout. Default False.
            on_stdout, on_stderr: Called with each chunk of output in bytes, as it arrives; None by default. With `background`
                they are called beside the caller; what they raise ends the stream and is raised by wait().
            output_limit_bytes: How many of the newest bytes of stdout and stderr together the result keeps, 8 MiB by
                default; 0 keeps none. Callbacks see everything.
            background: Return a Command at once. Default False.

        Raises:
            CommandNotStartedError: The command never ran.
            ConflictError: The sandbox does not run.
            APIError: The server refused, such as 429 with the code "exec_limit".
            ShardConnectionError: The server is not reachable or the stream ended early.
            TypeError, ValueError: An argument is wrong.

        Example:
            >>> result = await sandbox.exec("echo $GREETING from $(pwd)", env={"GREETING": "hello"}, workdir="/tmp")
            >>> print(result.stdout)
            hello from /tmp
        """
        if background and not (stdin is None or isinstance(stdin, bool)):
            raise TypeError("stdin of a background command is True or False: send the input with write_stdin()")
        if not background and not (stdin is None or stdin is False or isinstance(stdin, (str, bytes, bytearray, memoryview))):
            raise TypeError("stdin of a foreground command is the whole input as text or bytes")
        if isinstance(output_limit_bytes, bool) or not isinstance(output_limit_bytes, int):
            raise TypeError("output_limit_bytes must be a whole number")
        if output_limit_bytes < 0:
            raise ValueError("output_limit_bytes must not be negative")
        given = None if stdin is None or isinstance(stdin, bool) else stdin.encode() if isinstance(stdin, str) else bytes(stdin)
        body: dict[str, object] = present(command=argv(command), env=environ(env), workdir=workdir, user=user)
        if stdin is True or given is not None:
            body["stdin"] = True
        if tty:
            body["tty"] = True
        if isinstance(tty, TerminalSize):
            body["size"] = {"rows": tty.rows, "cols": tty.cols}
        sink = AsyncSink(on_stdout, on_stderr, output_limit_bytes)
        command_id = await start(self._transport, self.id, body)
        if background:
            return await _background(self._transport, self.id, command_id, sink)
        return await run_foreground(await attach(self._transport, self.id, command_id, sink), given)

    async def run(
        self,
        command: str | Sequence[str],
        *,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
        restart: Restart | None = None,
    ) -> AsyncProcess:
        """Starts a named process under the sandbox's supervisor and returns it as soon as it runs.

        Args:
            command: A string runs under /bin/sh -c; a list runs as it is, without a shell.
            name: Up to 32 of a-z, 0-9, ".", "_" and "-"; the base name of the program by default.
            env: Variables added to the sandbox's environment; none by default.
            workdir: The working directory; the sandbox's by default.
            user: A user name or uid in the sandbox; the sandbox's by default.
            restart: When it is started again; Restart("unless-stopped") by default.

        Raises:
            CommandNotStartedError: The program never ran.
            ConflictError: The name still runs ("name_taken"), or 16 processes do ("process_limit").

        Example:
            >>> process = await sandbox.run("while sleep 1; do echo tick; done", name="ticker")
        """
        body = present(command=argv(command), name=name, env=environ(env), workdir=workdir, user=user)
        if restart is not None:
            body["restart"] = {"policy": restart.policy, "retries": restart.retries, "backoff": restart.backoff}
        answer = await self._transport.call("POST", self._path("processes"), body=body, waits=True)
        return AsyncProcess(self._transport, self.id, read(answer, process_info, "a process"))

    async def egress_log(self) -> builtins.list[EgressDecision]:
        """The newest network decisions that the daemon holds, at most 10,000, oldest first.

        Raises:
            NotFoundError: The sandbox is gone.

        Example:
            >>> [d.host for d in await sandbox.egress_log() if d.verdict == "deny"]
            ['example.org']
        """
        return await self._transport.array(self._path("egress-log"), egress_decision, "an egress decision")

    def follow_egress_log(self) -> AsyncEgressFollow:
        """The newest decisions that the daemon holds, then each new one; ends when the sandbox stops.

        Raises:
            NotFoundError: The sandbox is gone. Raised by the first read, since a follow opens lazily.

        Example:
            >>> async for decision in sandbox.follow_egress_log():
            ...     print(decision.verdict, decision.host)
        """
        return AsyncEgressFollow(self._transport, self._path("egress-log"), {"follow": "true"})
