"""HTTP by httpx and the library below it: clients, request bounds, and what their exceptions mean."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import httpcore
import httpx

from ._errors import ProtocolError, ShardConnectionError, ShardError
from ._net import AsyncNet
from ._settings import Settings

Request: TypeAlias = httpcore.Request

# Whatever an exchange can fail with.
TransportError = (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError)

# A host that vanished without a word is noticed after about 25 s, however long the call may take.
_KEEPALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
]


def _know_asyncio() -> None:
    """Spares each request six failed imports, 0.5 ms in all.

    Wherever it has to wait, httpcore asks which library runs the event loop by importing sniffio, and Python does not
    remember that a module is not there. Without sniffio in the process trio is not there either, so that a running loop of
    asyncio is the answer; in every other case httpcore finds out as ever.
    """
    module: Any = getattr(httpcore, "_synchronization", None)
    ask: Callable[[], str] | None = getattr(module, "current_async_library", None)
    if ask is None:
        return

    def known() -> str:
        if "sniffio" not in sys.modules and asyncio._get_running_loop() is not None:
            return "asyncio"
        return ask()

    module.current_async_library = known


_know_asyncio()


class _Server:
    """What every request to one server has in common. httpx's own client would parse, merge and copy it each time."""

    def __init__(self, settings: Settings, version: str) -> None:
        parts = urlsplit(settings.remote)
        self._origin = parts.scheme.encode(), (parts.hostname or "").encode(), parts.port
        self._headers = [
            (b"Host", parts.netloc.encode()),
            (b"Accept", b"*/*"),
            (b"Accept-Encoding", b"identity"),
            (b"User-Agent", f"useshards-python/{version}".encode()),
            (b"Authorization", f"Bearer {settings.api_key}".encode()),
        ]
        # Every open stream holds a connection, so their number has no bound of its own.
        self._pool: dict[str, Any] = {
            "max_connections": None,
            "max_keepalive_connections": 16,
            "keepalive_expiry": 15.0,
            "socket_options": _KEEPALIVE,
        }
        # Loading the public CAs takes a while, and an http remote needs none.
        if parts.scheme == "https":
            self._pool["ssl_context"] = settings.tls or httpx.create_ssl_context()

    def request(
        self,
        method: str,
        target: str,
        *,
        content: bytes | Iterable[bytes] | AsyncIterable[bytes] | None,
        headers: Mapping[str, str],
        extensions: dict[str, Any],
    ) -> Request:
        """A request; a body that is an iterable needs a Content-Length among the headers."""
        sent = self._headers + [(name.encode(), value.encode()) for name, value in headers.items()]
        if isinstance(content, bytes) and "Content-Length" not in headers:
            sent.append((b"Content-Length", str(len(content)).encode()))
        elif content is None and method in ("POST", "PUT"):
            sent.append((b"Content-Length", b"0"))
        scheme, host, port = self._origin
        url = httpcore.URL(scheme=scheme, host=host, port=port, target=target.encode("ascii"))
        return httpcore.Request(method, url, headers=sent, content=content, extensions=extensions)


class _Answer:
    """The head of an answer."""

    def __init__(self, response: httpcore.Response) -> None:
        self._response = response
        self.status_code = response.status
        self.headers = httpx.Headers(response.headers)
        self.extensions = response.extensions


class AsyncResponse(_Answer):
    """An answer whose body is still to come."""

    def aiter_raw(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        return self._response.aiter_stream()

    async def aclose(self) -> None:
        """Lets go of the rest."""
        await self._response.aclose()


class Response(_Answer):
    """An answer whose body is still to come."""

    def iter_raw(self) -> Iterator[bytes]:
        """The body as it comes."""
        return self._response.iter_stream()

    def close(self) -> None:
        """Lets go of the rest."""
        self._response.close()


class AsyncClient(_Server):
    """A client for one server and one event loop."""

    def __init__(self, settings: Settings, version: str) -> None:
        super().__init__(settings, version)
        self._connections = httpcore.AsyncConnectionPool(network_backend=AsyncNet(), **self._pool)

    async def send(self, request: Request) -> AsyncResponse:
        """Sends a request. Raises a TransportError."""
        return AsyncResponse(await self._connections.handle_async_request(request))

    async def aclose(self) -> None:
        """Closes every connection."""
        await self._connections.aclose()


class Client(_Server):
    """A client for one server and any number of threads."""

    def __init__(self, settings: Settings, version: str) -> None:
        super().__init__(settings, version)
        self._connections = httpcore.ConnectionPool(**self._pool)

    def send(self, request: Request) -> Response:
        """Sends a request. Raises a TransportError."""
        return Response(self._connections.handle_request(request))

    def close(self) -> None:
        """Closes every connection."""
        self._connections.close()


def bounds(timeout: float | None, *, read: bool) -> dict[str, float | None]:
    """The bounds of a request in seconds. Without `read` the answer may take any time."""
    return {"connect": timeout, "read": timeout if read else None, "write": timeout, "pool": None}


def failure(exc: Exception, request: Request, where: str) -> ShardError:
    """What a failed exchange means to the caller. The server is named, the request is not."""
    bound = request.extensions["timeout"]["connect"]
    if isinstance(exc, httpcore.ConnectTimeout):
        return ShardConnectionError(f"cannot reach {where}: no connection within {bound:g} s")
    if isinstance(exc, httpcore.TimeoutException):
        return ShardConnectionError(f"{where} gave no answer within {bound:g} s")
    if isinstance(exc, httpcore.ConnectError):
        return ShardConnectionError(f"cannot reach {where}: {str(exc) or 'the connection was refused'}")
    if isinstance(exc, httpcore.RemoteProtocolError):
        text = str(exc)
        if "disconnected" in text or "closed connection" in text:
            return ShardConnectionError(f"{where} ended the connection before its answer was complete")
        return ProtocolError(f"the answer of {where} is not HTTP that can be read: {text}")
    return ShardConnectionError(f"the connection to {where} broke: {str(exc) or type(exc).__name__}")
