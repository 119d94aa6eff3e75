"""The only module that imports httpx: clients, request bounds, and what its exceptions mean."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any

import httpcore
import httpx

from ._errors import ProtocolError, ShardConnectionError, ShardError
from ._settings import Settings

AsyncClient = httpx.AsyncClient
Client = httpx.Client
Request = httpx.Request
Response = httpx.Response
TransportError = httpx.TransportError

# A host that vanished without a word is noticed after about 25 s, however long the call may take.
_KEEPALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
]

# Every open stream holds a connection, so their number has no bound of its own.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=16, keepalive_expiry=15)


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


def _options(settings: Settings) -> dict[str, Any]:
    # Loading the public CAs takes a while, and an http remote needs none.
    verify = settings.tls or settings.remote.startswith("https:")
    return {"verify": verify, "limits": _LIMITS, "socket_options": _KEEPALIVE}


def _headers(settings: Settings, version: str) -> dict[str, str]:
    return {
        "Authorization": f"Bearer {settings.api_key}",
        "User-Agent": f"useshards-python/{version}",
        "Accept-Encoding": "identity",
    }


def async_client(settings: Settings, version: str) -> AsyncClient:
    """A client for one server and one event loop."""
    transport = httpx.AsyncHTTPTransport(**_options(settings))
    return httpx.AsyncClient(transport=transport, headers=_headers(settings, version))


def client(settings: Settings, version: str) -> Client:
    """A client for one server and any number of threads."""
    return httpx.Client(transport=httpx.HTTPTransport(**_options(settings)), headers=_headers(settings, version))


def bounds(timeout: float | None, *, read: bool) -> dict[str, float | None]:
    """The bounds of a request in seconds. Without `read` the answer may take any time."""
    return httpx.Timeout(connect=timeout, read=timeout if read else None, write=timeout, pool=None).as_dict()


def failure(exc: TransportError, settings: Settings) -> ShardError:
    """What a failed exchange means to the caller. The server is named, the request is not."""
    where = settings.remote
    if isinstance(exc, httpx.ConnectTimeout):
        return ShardConnectionError(f"cannot reach {where}: no connection within {settings.timeout:g} s")
    if isinstance(exc, httpx.TimeoutException):
        return ShardConnectionError(f"{where} gave no answer within {settings.timeout:g} s")
    if isinstance(exc, httpx.ConnectError):
        return ShardConnectionError(f"cannot reach {where}: {str(exc) or 'the connection was refused'}")
    if isinstance(exc, httpx.RemoteProtocolError):
        text = str(exc)
        if "disconnected" in text or "closed connection" in text:
            return ShardConnectionError(f"{where} ended the connection before its answer was complete")
        return ProtocolError(f"the answer of {where} is not HTTP that can be read: {text}")
    return ShardConnectionError(f"the connection to {where} broke: {str(exc) or type(exc).__name__}")
