"""Commands: running one, and the handle of one that runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

from attrs import frozen

from .._errors import (
    CommandNotStartedError,
    ConflictError,
    NotFoundError,
    ProtocolError,
    ShardConnectionError,
    ShardError,
    detail_error,
)
from .._frames import BINARY, CLOSE, Message, close_reason
from .._models import CommandInfo, CommandResult, TerminalSize, command_info
from .._output import DEFAULT_OUTPUT_LIMIT, STDERR, STDOUT, Output
from .._runtime import AsyncLock, AsyncTask, async_sleep, async_tell
from .._socket import AsyncSocket, StreamCut, StreamSilent
from ._transport import AsyncTransport, read, segment

AsyncOutputCallback: TypeAlias = Callable[[bytes], object]

# The first byte of a message says what the rest is.
_STDIN, _EXIT, _STDIN_CLOSED, _ERROR = b"\x00", 3, b"\x04", 5

# One message of input, in bytes.
_PIECE = 64 << 10

# How long the server may take to say what became of a command whose stream is gone, in seconds. With the two heartbeats
# that found it silent, and asked twice, a dead server ends a wait within 30 s.
_EXPLAIN = 5.0

# Another client's attachment may still be on its way out: how often, in seconds, and how long it is tried again.
_RETRY_EVERY, _RETRY_FOR = 0.05, 2.0


@frozen
class AsyncSink:
    """Where a command's output goes."""

    on_stdout: AsyncOutputCallback | None = None
    on_stderr: AsyncOutputCallback | None = None
    limit: int = DEFAULT_OUTPUT_LIMIT


class AsyncAttachment:
    """One stream of a command, from its opening to its closing message."""

    def __init__(
        self, transport: AsyncTransport, sandbox_id: str, command_id: str, sink: AsyncSink, socket: AsyncSocket
    ) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._id = command_id
        self._sink = sink
        self._socket = socket
        self._output = Output(sink.limit)
        self._fed = False
        self._left = False
        transport.live.add(self)

    @classmethod
    async def open(cls, transport: AsyncTransport, sandbox_id: str, command_id: str, sink: AsyncSink) -> AsyncAttachment:
        """Attaches, and waits a moment for an earlier attachment to go away."""
        deadline = time.monotonic() + _RETRY_FOR
        path = command_path(sandbox_id, command_id)
        while True:
            try:
                return cls(transport, sandbox_id, command_id, sink, await transport.upgrade(path))
            except ConflictError as exc:
                if exc.code != "in_use" or time.monotonic() >= deadline:
                    raise
                await async_sleep(_RETRY_EVERY)

    async def run(self) -> CommandResult:
        """Takes the output until the command has ended. Raises what the stream ended with instead."""
        try:
            while True:
                try:
                    message = await self._socket.receive()
                except StreamSilent:
                    # Input that the program does not read keeps our heartbeat from being read: the record knows better.
                    if not self._fed or not await self._runs():
                        raise
                    continue
                kind, payload = split(message, "a command's stream")
                if kind == _EXIT:
                    result = self._exit(payload)
                    await self._socket.finish()
                    return result
                self._output.add(kind, payload)
                callback = self._sink.on_stdout if kind == STDOUT else self._sink.on_stderr
                if callback is not None and payload:
                    await async_tell(callback, payload)
        except StreamCut as exc:
            if self._left:
                raise ShardConnectionError(f"this client let go of command {self._id}, which goes on without it") from None
            raise await self._explain(exc) from exc
        finally:
            await self.aclose()

    def _exit(self, payload: bytes) -> CommandResult:
        fields = read(decode(payload), lambda f: f, "an exit message")
        failed = fields.maybe("error", str)
        if failed is not None:
            raise CommandNotStartedError(fields.maybe("code", int) or 126, failed)
        lost = fields.maybe("lost_bytes", int) or 0
        stdout, stderr = self._output.data(STDOUT), self._output.data(STDERR)
        return CommandResult(
            id=self._id,
            exit_code=fields.number("code"),
            signal=fields.maybe("signal", int) or None,
            stdout=self._output.text(STDOUT, stdout, lost=lost > 0),
            stderr=self._output.text(STDERR, stderr, lost=lost > 0),
            stdout_bytes=stdout,
            stderr_bytes=stderr,
            lost_bytes=lost,
        )

    async def _record(self) -> CommandInfo:
        answer = await self._transport.call("GET", command_path(self._sandbox_id, self._id), within=_EXPLAIN)
        return read(answer, command_info, "a command")

    async def _runs(self) -> bool:
        try:
            return (await self._record()).state == "running"
        except ShardError:
            return False

    async def _explain(self, cut: StreamCut) -> ShardConnectionError:
        """A stream that broke, in terms of what became of the command."""
        said = f"the stream of command {self._id} ended before the command's last message ({cut})"
        try:
            record = await self._record()
        except NotFoundError:
            return ShardConnectionError(f"{said}; the server does not know the command any more")
        except ShardError as exc:
            return ShardConnectionError(f"{said}; its record cannot be read: {exc}")
        if record.state == "running":
            return ShardConnectionError(f"{said}; the command is still running: reconnect() attaches to it again")
        return ShardConnectionError(
            f"{said}; the command has ended with exit code {record.exit_code}: reconnect() reads the output that is held"
        )

    async def feed(self, data: bytes) -> None:
        """Sends the whole input and its end. A command that ends before it has read all of it is no failure."""
        try:
            await self.write(data)
            await self.close_stdin()
        except StreamCut:
            pass

    async def write(self, data: bytes) -> None:
        """Sends input."""
        with memoryview(data) as view:
            for at in range(0, len(view), _PIECE):
                self._fed = True
                await self._socket.send(_STDIN + view[at : at + _PIECE])

    async def close_stdin(self) -> None:
        """Says that there is no more input."""
        await self._socket.send(_STDIN_CLOSED)

    async def aclose(self) -> None:
        """Lets go of the command, which goes on."""
        self._left = True
        self._transport.live.discard(self)
        await self._socket.aclose()


def split(message: Message, what: str) -> tuple[int, bytes]:
    """The kind and the payload of a message: output or the last one. Raises the error that it carries instead."""
    if message.opcode == CLOSE:
        raise StreamCut(close_reason(message)[1] or "the server closed the stream")
    if message.opcode != BINARY:
        raise ProtocolError(f"the server sent a text message on {what}")
    if not message.data:
        raise ProtocolError(f"the server sent an empty message on {what}")
    kind, payload = message.data[0], message.data[1:]
    if kind not in (STDOUT, STDERR, _EXIT, _ERROR):
        raise ProtocolError(f"the server sent a message of the unknown kind {kind} on {what}")
    if kind != _ERROR:
        return kind, payload
    detail = read(decode(payload), lambda f: f.maybe("error", dict), "an error message") or {}
    if not isinstance(detail.get("code"), str) or not isinstance(detail.get("message"), str):
        raise ProtocolError("the error message of the server's stream has no code or no message")
    raise detail_error(None, detail)


def decode(payload: bytes) -> object:
    """The JSON in a message."""
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        raise ProtocolError("a message of the server's stream is not JSON") from None


def command_path(sandbox_id: str, command_id: str, verb: str = "") -> str:
    """The path of a command's routes."""
    path = f"/v0/sandboxes/{segment(sandbox_id, 'sandbox')}/exec/{segment(command_id, 'command id')}"
    return f"{path}/{verb}" if verb else path


class AsyncCommand:
    """A command that the daemon holds: sandbox.exec(..., background=True) and sandbox.commands.get(id) return it.

    While it is attached, its output is taken in the background. Whatever becomes of the handle, the command keeps
    running until it ends or kill() is called.

    Attributes:
        id: The command's id, by which any client finds it again.
        sandbox_id: The id of its sandbox.

    Example:
        >>> command = await sandbox.exec("sleep 5; echo done", background=True)
        >>> result = await command.wait(timeout=60)
        >>> print(result.stdout)
        done
    """

    def __init__(self, transport: AsyncTransport, sandbox_id: str, command_id: str, sink: AsyncSink) -> None:
        self._transport = transport
        self.id = command_id
        self.sandbox_id = sandbox_id
        self._sink = sink
        self._lock = AsyncLock()  # one attach at a time; never held while output is waited for
        self._attachment: AsyncAttachment | None = None
        self._pump: AsyncTask[CommandResult] | None = None

    def __repr__(self) -> str:
        return f"<AsyncCommand {self.id} in {self.sandbox_id}>"

    async def wait(self, timeout: float | None = None) -> CommandResult:
        """Waits until the command has ended and all its output is here.

        A handle that is not attached attaches first, and is given the output that the daemon still holds.

        Args:
            timeout: Seconds, without a bound when None. The command is not ended when the time is up.

        Raises:
            TimeoutError: The command has not ended in time. The handle stays attached: wait again, or kill().
            CommandNotStartedError: The command never ran.
            ShardConnectionError: The stream ended early; the message says what became of the command.
            ProtocolError: The stream cannot be read.
            APIError: The server refused, such as NotFoundError for a command it no longer holds.

        Example:
            >>> try:
            ...     result = await command.wait(timeout=30)
            ... except TimeoutError:
            ...     await command.kill("KILL")
            ...     result = await command.wait()
        """
        if timeout is not None and timeout < 0:
            raise ValueError("timeout must not be negative")
        deadline = None if timeout is None else time.monotonic() + timeout
        attached = self._pump is None
        pump = await self._attach()
        try:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ended = await pump.wait(left)
        except BaseException:
            if attached:
                await self.disconnect()
            raise
        if not ended:
            raise TimeoutError(f"command {self.id} has not ended within {timeout:g} s")
        return pump.result()

    async def _attach(self) -> AsyncTask[CommandResult]:
        async with self._lock:
            if self._pump is None:
                attachment = await AsyncAttachment.open(self._transport, self.sandbox_id, self.id, self._sink)
                self._attachment = attachment
                self._pump = AsyncTask(attachment.run)
            return self._pump

    async def kill(self, signal: Literal["TERM", "KILL"] = "TERM") -> None:
        """Sends a signal to the command.

        Args:
            signal: "TERM", the default, or "KILL".

        Raises:
            ConflictError: It has ended already (code "exec_exited").
            NotFoundError: The daemon no longer holds it.

        Example:
            >>> await command.kill("KILL")
        """
        await self._transport.call("POST", command_path(self.sandbox_id, self.id, "kill"), body={"signal": signal})

    async def write_stdin(self, data: str | bytes) -> None:
        """Sends input to a command that was started with stdin=True; returns when the connection has taken it.

        Raises:
            RuntimeError: The handle is not attached.
            ShardConnectionError: The stream has ended.

        Example:
            >>> await command.write_stdin("hello\\n")
        """
        try:
            await self._attached().write(data.encode() if isinstance(data, str) else bytes(data))
        except StreamCut as exc:
            raise ShardConnectionError(f"command {self.id} takes no more input: {exc}") from exc

    async def close_stdin(self) -> None:
        """Says that there is no more input.

        Raises:
            RuntimeError: The handle is not attached.
            ShardConnectionError: The stream has ended.

        Example:
            >>> await command.close_stdin()
        """
        try:
            await self._attached().close_stdin()
        except StreamCut as exc:
            raise ShardConnectionError(f"command {self.id} takes no more input: {exc}") from exc

    def _attached(self) -> AsyncAttachment:
        if self._attachment is None:
            raise RuntimeError("the handle is not attached: call reconnect() first")
        return self._attachment

    async def resize(self, rows: int, cols: int) -> None:
        """Tells the command's terminal its size.

        Args:
            rows, cols: Character cells, each 0 to 65535.

        Raises:
            ValueError: A number is out of range.
            NotFoundError: The command has no terminal or has ended.

        Example:
            >>> await command.resize(50, 200)
        """
        size = TerminalSize(rows, cols)
        await self._transport.call(
            "POST", command_path(self.sandbox_id, self.id, "resize"), body={"rows": size.rows, "cols": size.cols}
        )

    async def inspect(self) -> CommandInfo:
        """Reads the daemon's record of the command.

        Raises:
            NotFoundError: The daemon no longer holds it.

        Example:
            >>> (await command.inspect()).state
            'running'
        """
        answer = await self._transport.call("GET", command_path(self.sandbox_id, self.id))
        return read(answer, command_info, "a command")

    async def disconnect(self) -> None:
        """Leaves the command's stream; the command keeps running. Does nothing when the handle is not attached.

        A wait() under way raises ShardConnectionError.

        Example:
            >>> await command.disconnect()
        """
        async with self._lock:
            attachment, pump = self._attachment, self._pump
            self._attachment = self._pump = None
        if attachment is not None and pump is not None:
            await attachment.aclose()
            await pump.wait()

    async def reconnect(self) -> None:
        """Attaches to the command again; the daemon replays the output it still holds, to callbacks too.

        Does nothing while the handle is attached and its stream runs.

        Raises:
            ConflictError: Another client is attached (code "in_use"), for more than 2 s.
            NotFoundError: The daemon no longer holds it.

        Example:
            >>> await command.reconnect()
            >>> result = await command.wait()
        """
        if self._pump is not None and self._pump.done():
            await self.disconnect()
        await self._attach()


class AsyncCommands:
    """The commands that the daemon holds for a sandbox: those that run, and up to 32 that have ended.

    Example:
        >>> for info in await sandbox.commands.list():
        ...     print(info.id, info.state)
    """

    def __init__(self, transport: AsyncTransport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id

    async def list(self) -> list[CommandInfo]:
        """The records of all commands.

        Raises:
            NotFoundError: There is no such sandbox.

        Example:
            >>> [info.exit_code for info in await sandbox.commands.list()]
            [0, None]
        """
        found, _ = await self._transport.pages(f"/v0/sandboxes/{segment(self._sandbox_id, 'sandbox')}/exec", "execs")
        return [read(item, command_info, "a command") for item in found]

    async def get(self, id: str) -> AsyncCommand:
        """Finds a command again, from any client. The handle is not attached: wait() or reconnect() attaches.

        Raises:
            NotFoundError: The daemon does not hold it.

        Example:
            >>> command = await sandbox.commands.get(command_id)
            >>> result = await command.wait()
        """
        command = AsyncCommand(self._transport, self._sandbox_id, id, AsyncSink())
        await command.inspect()
        return command


async def start(transport: AsyncTransport, sandbox_id: str, body: dict[str, object]) -> str:
    """Starts a command whose output is held for its first attachment, and returns its id."""
    path = f"/v0/sandboxes/{segment(sandbox_id, 'sandbox')}/exec"
    return read(await transport.call("POST", path, body={**body, "attach": True}), lambda f: f.text("exec"), "a command")


async def attach(transport: AsyncTransport, sandbox_id: str, command_id: str, sink: AsyncSink) -> AsyncAttachment:
    """Attaches to a command that has just been started."""
    try:
        return await AsyncAttachment.open(transport, sandbox_id, command_id, sink)
    except ShardConnectionError as exc:
        raise ShardConnectionError(f"command {command_id} was started, but its output cannot be followed: {exc}") from exc


async def run_foreground(attachment: AsyncAttachment, stdin: bytes | None) -> CommandResult:
    """Passes the whole input while the output is taken, and lets go of everything however it ends."""
    writer = None
    try:
        if stdin is not None:
            writer = AsyncTask(attachment.feed, stdin)
        return await attachment.run()
    finally:
        await attachment.aclose()
        if writer is not None:
            await writer.wait()


async def background(transport: AsyncTransport, sandbox_id: str, command_id: str, sink: AsyncSink) -> AsyncCommand:
    """The attached handle of a command that has just been started."""
    command = AsyncCommand(transport, sandbox_id, command_id, sink)
    try:
        await command.reconnect()
    except ShardConnectionError as exc:
        raise ShardConnectionError(f"command {command_id} was started, but its output cannot be followed: {exc}") from exc
    return command
