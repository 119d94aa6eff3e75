"""Named processes, and streams that are followed: logs and egress decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from typing_extensions import override

from .._errors import ProtocolError, ShardConnectionError, api_error
from .._frames import CLOSE, TEXT, Message, close_reason
from .._models import EgressDecision, FileEvent, ProcessInfo, egress_decision, file_event, process_info
from .._records import Fields
from .._runtime import AsyncTask
from .._socket import AsyncSocket, StreamCut
from ._command import decode, split
from ._transport import AsyncTransport, read, segment

T = TypeVar("T")


class AsyncFollow(Generic[T]):
    """An open-ended iterator over what happens. It opens its stream at the first item.

    It is also a context manager: leave it, or call aclose() from anywhere, to end the stream. A stream that breaks
    raises ShardConnectionError; an iteration that is cancelled or fails closes it.

    Example:
        >>> async with process.follow_logs() as logs:
        ...     async for chunk in logs:
        ...         print(chunk.decode(), end="")
    """

    def __init__(self, transport: AsyncTransport, path: str, query: Mapping[str, str]) -> None:
        self._transport = transport
        self._path = path
        self._query = query
        self._socket: AsyncSocket | None = None
        self._closed = False
        self._left = False  # it was closed while it was being read

    def _take(self, message: Message) -> T | None:
        """An item, None for none. Raises what the message reports."""
        raise NotImplementedError

    async def _open(self) -> AsyncSocket:
        """Opens the stream if need be."""
        if self._socket is None:
            self._transport.live.add(self)
            self._socket = await self._transport.upgrade(self._path, self._query)
            if self._closed:
                raise StreamCut("it was closed")
        return self._socket

    async def _receive(self) -> T | None:
        """Takes one message. Whatever goes wrong closes the stream."""
        try:
            socket = await self._open()
            return self._take(await socket.receive())
        except StreamCut as exc:
            self._left = self._closed
            await self.aclose()
            raise ShardConnectionError(f"the stream ended before what it follows did: {exc}") from exc
        except BaseException:
            await self.aclose()
            raise

    def __aiter__(self) -> AsyncFollow[T]:
        return self

    async def __anext__(self) -> T:
        if self._closed:
            raise StopAsyncIteration
        try:
            item = await self._receive()
        except ShardConnectionError:
            if self._left:
                raise StopAsyncIteration from None
            raise
        if item is None:
            if self._socket is not None:
                await self._socket.finish()
            await self.aclose()
            raise StopAsyncIteration
        return item

    async def __aenter__(self) -> AsyncFollow[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the stream; whoever iterates sees its end.

        Example:
            >>> await logs.aclose()
        """
        self._closed = True
        self._transport.live.discard(self)
        if self._socket is not None:
            await self._socket.aclose()


class AsyncLogFollow(AsyncFollow[bytes]):
    """The output of a process as bytes: its whole log, then what is written, until it ends or the sandbox stops.

    Example:
        >>> async for chunk in process.follow_logs():
        ...     print(chunk)
        b'tick 1\\n'
    """

    @override
    def _take(self, message: Message) -> bytes | None:
        kind, payload = split(message, "a log's stream")
        return None if kind == 3 else payload


class AsyncEgressFollow(AsyncFollow[EgressDecision]):
    """Network decisions: the newest that the daemon holds, then each new one, until the sandbox stops or is paused.

    Example:
        >>> async for decision in sandbox.follow_egress_log():
        ...     print(decision.verdict, decision.host)
    """

    @override
    def _take(self, message: Message) -> EgressDecision | None:
        return _record(message, egress_decision, "an egress decision")


class AsyncFileWatch(AsyncFollow[FileEvent]):
    """What changes below a directory, until the directory or the sandbox ends: files.watch() returns it.

    As a context manager it is in place when the block begins: what changes from then on is not missed. Without one it
    begins at the first item.

    Example:
        >>> async with sandbox.files.watch("/srv") as changes:
        ...     print([entry.name for entry in await sandbox.files.list("/srv")])
        ...     async for event in changes:
        ...         print(event.type, event.path)
        []
        created /srv/app.py
    """

    @override
    def _take(self, message: Message) -> FileEvent | None:
        return _record(message, file_event, "an event of a file")

    @override
    async def __aenter__(self) -> AsyncFileWatch:
        try:
            await self._open()
        except BaseException:
            await self.aclose()
            raise
        return self


def _record(message: Message, reader: Callable[[Fields], T], what: str) -> T | None:
    """What a text message holds, None for the end."""
    if message.opcode == CLOSE:
        code, reason = close_reason(message)
        if code == 1000:
            return None
        if code == 1011:
            raise api_error(500, "internal", reason or "the server could not go on")
        raise StreamCut(reason or "the server closed the stream")
    if message.opcode != TEXT:
        raise ProtocolError(f"the server sent a binary message where {what} belongs")
    return read(decode(message.data), reader, what)


class _AsyncEnd(AsyncFollow[ProcessInfo]):
    """How a process ended. Its output comes along and is dropped: unlike a plain answer, a stream has heartbeats."""

    @override
    def _take(self, message: Message) -> ProcessInfo | None:
        kind, payload = split(message, "a process's stream")
        return read(decode(payload), process_info, "a process") if kind == 3 else None

    async def run(self) -> ProcessInfo:
        """Waits for it."""
        while True:
            info = await self._receive()
            if info is not None:
                await self.aclose()
                return info


class AsyncProcess:
    """A named process under the sandbox's supervisor: sandbox.run() and sandbox.processes.get() return it.

    Attributes:
        name: Its name within the sandbox.
        sandbox: The id of its sandbox.
        info: The record that the last call on this handle returned.

    Example:
        >>> process = await sandbox.run("while sleep 1; do echo tick; done", name="ticker")
        >>> await process.kill()
    """

    def __init__(self, transport: AsyncTransport, sandbox_id: str, info: ProcessInfo) -> None:
        self._transport = transport
        self.sandbox = sandbox_id
        self.info = info

    def __repr__(self) -> str:
        return f"<AsyncProcess {self.name} in {self.sandbox}>"

    @property
    def name(self) -> str:
        """Its name within the sandbox.

        Example:
            >>> process.name
            'ticker'
        """
        return self.info.name

    def _path(self, verb: str = "") -> str:
        path = f"/v0/sandboxes/{segment(self.sandbox, 'sandbox')}/processes/{segment(self.name, 'process')}"
        return f"{path}/{verb}" if verb else path

    async def wait(self, timeout: float | None = None) -> ProcessInfo:
        """Waits until the process has ended and its restart policy will not start it again.

        Args:
            timeout: Seconds, without a bound when None. The process keeps running when the time is up.

        Raises:
            TimeoutError: It has not ended in time.
            NotFoundError: There is no such process (code "no_process") or sandbox.
            ShardConnectionError: The connection ended early.

        Example:
            >>> (await process.wait(timeout=60)).status.exit
            ExitStatus(code=0, signal=0)
        """
        if timeout is not None and timeout < 0:
            raise ValueError("timeout must not be negative")
        end = _AsyncEnd(self._transport, self._path("attach"), {})
        waiter = AsyncTask(end.run)
        try:
            if not await waiter.wait(timeout):
                raise TimeoutError(f"process {self.name} has not ended within {timeout:g} s")
        finally:
            await end.aclose()
            await waiter.wait()
        self.info = waiter.result()
        return self.info

    async def kill(self, *, force: bool = False) -> None:
        """Ends the process and calls off its restarts; returns when it is gone, which may take 30 s.

        Args:
            force: Send KILL at once instead of TERM first. Default False.

        Raises:
            ConflictError: The sandbox does not run.
            NotFoundError: There is no such process (code "no_process").

        Example:
            >>> await process.kill()
        """
        answer = await self._transport.call("POST", self._path("kill"), body={"force": force}, waits=True)
        self.info = read(answer, process_info, "a process")

    async def logs(self) -> str:
        """The output of every run that the daemon still holds, at most the newest 32 MiB; not UTF-8 shows as U+FFFD.

        Raises:
            NotFoundError: There is no such process (code "no_process").

        Example:
            >>> print(await process.logs(), end="")
            tick 1
        """
        return (await self._transport.get(self._path("logs"))).decode("utf-8", "replace")

    def follow_logs(self) -> AsyncLogFollow:
        """The output from the start of the log, then as it is written; ends with the process or the sandbox.

        Raises:
            NotFoundError: There is no such process. Raised by the first read, since a follow opens lazily.

        Example:
            >>> async for chunk in process.follow_logs():
            ...     print(chunk.decode(), end="")
        """
        return AsyncLogFollow(self._transport, self._path("logs"), {"follow": "true"})

    async def inspect(self) -> ProcessInfo:
        """Reads the process's record again.

        Raises:
            NotFoundError: There is no such process (code "no_process").

        Example:
            >>> (await process.inspect()).status.state
            'running'
        """
        self.info = read(await self._transport.call("GET", self._path()), process_info, "a process")
        return self.info


class AsyncProcesses:
    """The named processes of a sandbox.

    Example:
        >>> for info in await sandbox.processes.list():
        ...     print(info.name, info.status.state)
    """

    def __init__(self, transport: AsyncTransport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id

    async def list(self) -> list[ProcessInfo]:
        """The records of all processes, in the order in which they were first run.

        Raises:
            NotFoundError: There is no such sandbox.

        Example:
            >>> [info.name for info in await sandbox.processes.list()]
            ['ticker']
        """
        found, _ = await self._transport.pages(f"/v0/sandboxes/{segment(self._sandbox_id, 'sandbox')}/processes", "processes")
        return [read(item, process_info, "a process") for item in found]

    async def get(self, name: str) -> AsyncProcess:
        """Finds a process again, from any client.

        Raises:
            NotFoundError: There is no such process (code "no_process").

        Example:
            >>> process = await sandbox.processes.get("ticker")
        """
        path = f"/v0/sandboxes/{segment(self._sandbox_id, 'sandbox')}/processes/{segment(name, 'process')}"
        info = read(await self._transport.call("GET", path), process_info, "a process")
        return AsyncProcess(self._transport, self._sandbox_id, info)
