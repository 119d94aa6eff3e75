"""A WebSocket over a connection that has been upgraded: whole messages in and out, heartbeats, and an end that leaves
no socket behind.

The two twins differ most here, so both are written by hand. On asyncio one task reads and any task writes. On threads
a TLS object must never be read and written at once, and a writer that waits for room must not keep the reader from
making some: so every call into the socket is non-blocking and made under one lock, all waiting is done outside of it,
and what could not be written stays in an outbox that whoever comes next goes on with.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import threading
import time
from typing import Any

from ._errors import ProtocolError, ShardConnectionError
from ._frames import BINARY, CLOSE, PING, PONG, Decoder, Message, encode
from ._http import AsyncResponse, Response

# How long the server may be silent before it is asked for a sign of life, and again before it counts as gone, in seconds.
HEARTBEAT = 10.0

# How long the server's own close is waited for when it has said its last word, in seconds.
CLOSE_WAIT = 5.0

_READ = 64 << 10
# One TLS record: a write that is repeated after it did not fit must not be shorter than before.
_WRITE = 16 << 10


class StreamCut(ShardConnectionError):
    """The connection ended, by whomever, before a closing message. Private: callers turn it into an explanation."""


class StreamSilent(StreamCut):
    """The server gave no sign of life. The stream can go on being used if the caller knows better."""


class AsyncSocket:
    """One upgraded connection on the event loop."""

    def __init__(self, response: AsyncResponse) -> None:
        self._response = response
        self._stream = response.extensions["network_stream"]
        self._decoder = Decoder()
        self._lock = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()
        self._over = False  # the server has closed
        self._closed = False

    async def receive(self) -> Message:
        """The next message that is not a heartbeat; a close frame has been answered and is the last one.

        Raises StreamCut, StreamSilent and ProtocolError. Only one task may receive. A cancel loses nothing.
        """
        while True:
            message = self._decoder.next()
            if message is None:
                self._decoder.feed(await self._read())
            elif message.opcode == PING:
                self._write_aside(encode(PONG, message.data))
            elif message.opcode == CLOSE:
                self._over = True
                self._write_aside(encode(CLOSE, message.data[:2]))
                return message
            elif message.opcode != PONG:
                return message

    async def _read(self) -> bytes:
        for silence in range(2):
            try:
                async with asyncio.timeout(HEARTBEAT):
                    data: bytes = await self._stream.read(_READ)
            except TimeoutError:
                if not silence and not self._writes:  # else a heartbeat would queue behind what the server does not take
                    self._write_aside(encode(PING, b""))
                continue
            except Exception as exc:  # the stream's own errors belong to a library below httpx
                raise StreamCut(str(exc) or "the connection was cut") from exc
            if not data:
                raise StreamCut("the server closed the connection")
            return data
        raise StreamSilent("the server gave no sign of life")

    async def send(self, payload: bytes) -> None:
        """Sends a binary message; returns when the connection has taken it. A cancel does not break the frame."""
        await asyncio.shield(self._start(encode(BINARY, payload)))

    def _write_aside(self, frame: bytes) -> None:
        """Sends a control frame without ever waiting: the reader does this."""
        _ = self._start(frame)

    def _start(self, frame: bytes) -> asyncio.Task[None]:
        task = asyncio.create_task(self._write(frame))
        self._writes.add(task)
        task.add_done_callback(self._written)
        return task

    def _written(self, task: asyncio.Task[None]) -> None:
        self._writes.discard(task)
        if not task.cancelled():
            task.exception()

    async def _write(self, frame: bytes) -> None:
        async with self._lock:
            try:
                await self._stream.write(frame)
            except Exception as exc:
                raise StreamCut(str(exc) or "the connection was cut") from exc

    async def finish(self) -> None:
        """After the last message: lets the server close, so that neither side sees a cut connection."""
        try:
            async with asyncio.timeout(CLOSE_WAIT):
                while not self._over:
                    await self.receive()
                await asyncio.gather(*self._writes, return_exceptions=True)
        except (TimeoutError, ShardConnectionError, ProtocolError):
            pass
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the connection. Whoever receives or sends gets StreamCut."""
        if self._closed:
            return
        self._closed = True
        for task in list(self._writes):
            task.cancel()
        await self._response.aclose()


class Socket:
    """One upgraded connection, for any number of threads."""

    def __init__(self, response: Response) -> None:
        self._response = response
        stream = response.extensions["network_stream"]
        self._sock: socket.socket = stream.get_extra_info("socket")
        self._decoder = Decoder()
        # Guards the socket object and everything below. Nothing blocks while it is held.
        self._lock = threading.Lock()
        self._outbox = bytearray()
        self._over = False  # the server has closed
        self._closed = False
        self._users = 0  # threads that are inside; the last one out of a closed socket lets go of the descriptor
        self._feed_leading(stream)

    def _feed_leading(self, stream: Any) -> None:
        """Takes what arrived along with the server's answer, which the library below holds."""
        try:
            self._decoder.feed(stream.read(1 << 20, timeout=0))
        except Exception:  # nothing there; a real failure shows itself at the next read
            pass
        self._sock.setblocking(False)

    def receive(self, deadline: float | None = None) -> Message:
        """The next message that is not a heartbeat; a close frame has been answered and is the last one.

        Raises StreamCut, StreamSilent and ProtocolError. Only one thread may receive.
        """
        while True:
            message = self._decoder.next()
            if message is None:
                self._decoder.feed(self._read(deadline))
            elif message.opcode == PING:
                self._write_aside(encode(PONG, message.data))
            elif message.opcode == CLOSE:
                self._over = True
                self._write_aside(encode(CLOSE, message.data[:2]))
                return message
            elif message.opcode != PONG:
                return message

    def _read(self, deadline: float | None) -> bytes:
        for silence in range(2):
            until = time.monotonic() + HEARTBEAT
            while (now := time.monotonic()) < until:
                if deadline is not None and now >= deadline:
                    raise StreamCut("the server did not close the connection")
                data = self._try_read(min(until, deadline or until))
                if data is not None:
                    if not data:
                        raise StreamCut("the server closed the connection")
                    return data
            if not silence and not self._outbox:  # else a heartbeat would queue behind what the server does not take
                self._write_aside(encode(PING, b""))
        raise StreamSilent("the server gave no sign of life")

    def _try_read(self, until: float) -> bytes | None:
        """Reads, or waits until there may be something to read or time is up and returns None."""
        self._enter()
        try:
            with self._lock:
                self._check()
                write = self._flush()
                try:
                    return self._sock.recv(_READ)
                except (BlockingIOError, ssl.SSLWantReadError):
                    pass
                except ssl.SSLWantWriteError:
                    write = True
                except OSError as exc:
                    raise StreamCut(str(exc) or "the connection was cut") from exc
            self._wait(True, write, until - time.monotonic())
            return None
        finally:
            self._leave()

    def send(self, payload: bytes) -> None:
        """Sends a binary message; returns when the connection has taken it."""
        self._enter()
        try:
            with self._lock:
                self._check()
                self._outbox += encode(BINARY, payload)
            while True:
                with self._lock:
                    self._check()
                    if not self._flush():
                        return
                self._wait(False, True, 1.0)
        finally:
            self._leave()

    def _write_aside(self, frame: bytes) -> None:
        """Sends a control frame without ever waiting: the reader does this."""
        with self._lock:
            if not self._closed:
                self._outbox += frame
                self._flush()

    def _flush(self) -> bool:
        """Writes what the connection takes now; whether something is left. The lock is held."""
        try:
            while self._outbox:
                with memoryview(self._outbox) as view:
                    sent = self._sock.send(view[:_WRITE])
                del self._outbox[:sent]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return True
        except OSError as exc:
            raise StreamCut(str(exc) or "the connection was cut") from exc
        return False

    def _wait(self, read: bool, write: bool, timeout: float) -> None:
        timeout = max(timeout, 0)
        if hasattr(select, "poll"):
            poll = select.poll()
            poll.register(self._sock, (select.POLLIN if read else 0) | (select.POLLOUT if write else 0))
            poll.poll(timeout * 1000)
        else:
            select.select([self._sock] if read else [], [self._sock] if write else [], [], timeout)

    def _check(self) -> None:
        if self._closed:
            raise StreamCut("the stream was closed by this client")

    def _enter(self) -> None:
        with self._lock:
            self._check()
            self._users += 1

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._closed and not self._users
        if last:
            self._response.close()

    def finish(self) -> None:
        """After the last message: lets the server close, so that neither side sees a cut connection."""
        deadline = time.monotonic() + CLOSE_WAIT
        try:
            while not self._over:
                self.receive(deadline)
        except (ShardConnectionError, ProtocolError):
            pass
        self.close()

    def close(self) -> None:
        """Ends the connection, from any thread. Whoever receives or sends gets StreamCut."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            last = not self._users
            try:
                # Of the plain socket: the TLS object's own would be taken apart under a thread that uses it.
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
            except OSError:
                pass
        if last:
            self._response.close()
