"""Connections on an event loop for httpcore, whose own go through a layer that costs an exec 2 ms: here whatever has
arrived is decrypted in one go, without a task switch for each TLS record. Threads are well served by httpcore itself.

TLS sessions are not resumed: handing one to Python's ssl copies it with its certificates, which takes longer than the
part of the handshake that it saves (measured).
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import httpcore

# How much may wait for a slow reader before the peer has to, in bytes.
_HIGH_WATER = 512 << 10


@contextmanager
def _mapped(timeout: type[Exception], other: type[Exception]) -> Generator[None]:
    """What went wrong, under the names of httpcore."""
    try:
        yield
    except TimeoutError as exc:
        raise timeout(str(exc)) from exc
    except OSError as exc:  # TLS errors are some of these
        raise other(str(exc)) from exc


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class AsyncNet(httpcore.AsyncNetworkBackend):
    """Connects on an event loop."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Opens a connection; `timeout` in seconds."""
        del local_address
        with _mapped(httpcore.ConnectTimeout, httpcore.ConnectError):
            async with asyncio.timeout(timeout):
                loop = asyncio.get_running_loop()
                race = None if _is_address(host) else 0.25  # seconds until a name's next address is tried as well
                transport, wire = await loop.create_connection(_Wire, host, port, happy_eyeballs_delay=race)
        try:
            sock = transport.get_extra_info("socket")
            for option in socket_options or ():
                sock.setsockopt(*option)
        except OSError as exc:
            transport.abort()
            raise httpcore.ConnectError(str(exc)) from exc
        return AsyncNetStream(wire)

    async def sleep(self, seconds: float) -> None:
        """Part of the interface."""
        await asyncio.sleep(seconds)


class _Wire(asyncio.Protocol):
    """The plain side of a connection: bytes as they came, and one who may wait for more."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.received: bytearray | ssl.MemoryBIO = bytearray()
        self.over = False
        self.error: Exception | None = None
        self.held = 0
        self._paused = False
        self._reader: asyncio.Future[None] | None = None
        self._room: asyncio.Event = asyncio.Event()
        self._room.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if isinstance(self.received, bytearray):
            self.received += data
        else:
            self.received.write(data)
        self.held += len(data)
        if self.held > _HIGH_WATER and not self._paused:
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        self._end(None)
        return True  # what is still to be sent may go

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc)
        self._room.set()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def taken(self) -> None:
        """All that had come was read."""
        self.held = 0
        if self._paused:
            self._paused = False
            self.transport.resume_reading()

    def _end(self, exc: Exception | None) -> None:
        if not self.over:
            self.over, self.error = True, exc
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def more(self, timeout: float | None) -> None:
        """Waits until something new came or nothing more will. Raises TimeoutError."""
        if self.over:
            return
        if self._reader is not None:
            raise RuntimeError("somebody else reads this connection")
        loop = asyncio.get_running_loop()
        self._reader = reader = loop.create_future()
        alarm = None if timeout is None else loop.call_later(timeout, _expire, reader)
        try:
            await reader
        finally:
            self._reader = None
            if alarm is not None:
                alarm.cancel()

    async def write(self, data: bytes, timeout: float | None) -> None:
        """Sends, and waits for room. Raises TimeoutError and OSError."""
        if self.transport.is_closing():
            raise self.error if isinstance(self.error, OSError) else BrokenPipeError("the connection was closed")
        self.transport.write(data)
        if not self._room.is_set():
            async with asyncio.timeout(timeout):
                await self._room.wait()
            if self.error is not None:
                raise self.error


def _expire(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())


class AsyncNetStream(httpcore.AsyncNetworkStream):
    """One connection on the event loop, plain until start_tls. One task reads, one writes."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire
        self._tls: ssl.SSLObject | None = None
        self._out = ssl.MemoryBIO()

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """What has come, at most `max_bytes`; b"" at the end."""
        with _mapped(httpcore.ReadTimeout, httpcore.ReadError):
            while True:
                data = self._take(max_bytes)
                if data is not None:
                    return data
                await self._wire.more(timeout)

    def _take(self, most: int) -> bytes | None:
        wire, tls = self._wire, self._tls
        if tls is None:
            raw = wire.received
            assert isinstance(raw, bytearray)
            data = bytes(raw[:most])
            del raw[:most]
            if not raw:
                wire.taken()
        else:
            data = self._decrypt(tls, most)
        if not data and wire.over:
            if wire.error is not None:
                raise wire.error
            return b""
        return data or None

    def _decrypt(self, tls: ssl.SSLObject, most: int) -> bytes:
        parts, got = [], 0
        try:
            while got < most:
                part = tls.read(most - got)
                if not part:
                    self._wire.over = True
                    break
                parts.append(part)
                got += len(part)
        except ssl.SSLWantReadError:
            self._wire.taken()
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            self._wire.over = True
        if self._out.pending:  # an answer to a change of keys
            self._wire.transport.write(self._out.read())
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Sends, and waits for room."""
        if not buffer:
            return
        with _mapped(httpcore.WriteTimeout, httpcore.WriteError):
            if self._tls is not None:
                with memoryview(buffer) as view:
                    sent = 0
                    while sent < len(view):
                        sent += self._tls.write(view[sent:])
                buffer = self._out.read()
            await self._wire.write(buffer, timeout)

    async def aclose(self) -> None:
        """Ends the connection, without waiting for anything."""
        transport = self._wire.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size():
            transport.abort()
            return
        if self._tls is not None:
            try:
                self._tls.unwrap()
            except (OSError, ValueError):
                pass  # the other side has said nothing yet
            if self._out.pending:
                transport.write(self._out.read())
        transport.close()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Goes on under TLS; `timeout` in seconds for all of the handshake."""
        arrived = self._wire.received
        assert isinstance(arrived, bytearray)
        self._wire.received = incoming = ssl.MemoryBIO()
        incoming.write(arrived)
        tls = ssl_context.wrap_bio(incoming, self._out, server_hostname=server_hostname)
        try:
            with _mapped(httpcore.ConnectTimeout, httpcore.ConnectError):
                async with asyncio.timeout(timeout):
                    await self._handshake(tls)
        except BaseException:
            self._wire.transport.abort()
            raise
        self._tls = tls
        return self

    async def _handshake(self, tls: ssl.SSLObject) -> None:
        while True:
            try:
                tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                pass
            finally:
                if self._out.pending:
                    self._wire.transport.write(self._out.read())
            if self._wire.over:
                raise self._wire.error or ConnectionResetError("the server closed the connection during the TLS handshake")
            await self._wire.more(None)

    def get_extra_info(self, info: str) -> Any:
        """What httpcore asks for."""
        if info == "ssl_object":
            return self._tls
        if info == "is_readable":
            return self._wire.over or bool(self._wire.held)
        return self._wire.transport.get_extra_info(info)
