"""Requests and answers: URLs, bounds, errors, pages, streams. Knows the wire, no sandbox and no command."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urlencode

from .._errors import ProtocolError, ShardConnectionError, ShardError, refusal
from .._frames import accept_of, new_key
from .._http import AsyncClient, AsyncResponse, Request, TransportError, bounds, failure
from .._records import Fields
from .._runtime import AsyncSemaphore, AsyncSending, Strays
from .._settings import Settings
from .._socket import AsyncSocket
from .._version import __version__

T = TypeVar("T")

# The longest JSON answer that is taken, in bytes: far above any real list.
_MAX_ANSWER = 256 << 20

# shard serve closes a burst of more than 32 connections from one address that have not shown their key yet.
_UNAUTHENTICATED = 16


class AsyncCloseable(Protocol):
    """What a client closes when it is closed itself."""

    async def aclose(self) -> None: ...


def segment(ref: str, what: str) -> str:
    """A name as part of a path. A name can never change which route is meant."""
    if not isinstance(ref, str):
        raise TypeError(f"{what} must be a string")
    if not ref:
        raise ValueError(f"{what} is empty")
    if ref in (".", ".."):
        return ref.replace(".", "%2E")
    return quote(ref, safe="", errors="surrogateescape")


def read(value: Any, reader: Callable[[Fields], T], what: str) -> T:
    """Reads an answer; whatever cannot be read is a ProtocolError."""
    try:
        return reader(Fields(value, what))
    except ValueError as exc:
        raise ProtocolError(f"the server's answer cannot be read as {what}: {exc}") from None


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:  # its own text would show the value
        raise ValueError("an argument holds a lone surrogate, which is no text that can be sent") from None


class AsyncTransport:
    """The connection of one client to its server."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = AsyncClient(settings, __version__)
        self._gate = AsyncSemaphore(_UNAUTHENTICATED)
        self._strays: Strays = set()
        self._closed = False
        self.live: set[AsyncCloseable] = set()

    @property
    def remote(self) -> str:
        """Scheme, host and port of the server."""
        return self._settings.remote

    async def aclose(self) -> None:
        """Closes every stream and connection."""
        self._closed = True
        for stream in list(self.live):
            await stream.aclose()
        await AsyncSending.finish(self._strays)
        await self._client.aclose()

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        waits: bool = False,
        within: float | None = None,
    ) -> Any:
        """A request with a JSON answer, None when the answer has no body.

        `waits` takes the bound off the answer; `within` is a shorter one than the client's, in seconds.
        """
        headers, content = {}, None
        if body is not None:
            headers, content = {"Content-Type": "application/json"}, _encode(body)
        asked = self.open(method, path, query=query, content=content, headers=headers, waits=waits, within=within)
        async with asked as response:
            data = await self._read_all(response, waits=waits)
        if response.status_code == 204 or (not data and method == "DELETE"):
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise ProtocolError(f"the answer of {self.remote} to {method} {path} is not JSON") from None

    async def array(self, path: str, reader: Callable[[Fields], T], what: str) -> list[T]:
        """An answer that is a bare array."""
        answer = await self.call("GET", path)
        if not isinstance(answer, list):
            raise ProtocolError(f"the answer of {self.remote} to GET {path} is not an array")
        return [read(item, reader, what) for item in answer]

    async def get(self, path: str, *, query: Mapping[str, str] | None = None) -> bytes:
        """The bytes of a plain answer."""
        async with self.open("GET", path, query=query) as response:
            return await self._read_all(response, waits=False)

    async def head(self, path: str, query: Mapping[str, str]) -> Mapping[str, str]:
        """The headers of an answer."""
        async with self.open("HEAD", path, query=query) as response:
            return response.headers

    async def pages(self, path: str, key: str, query: Mapping[str, str] | None = None) -> tuple[list[Any], list[str]]:
        """All entries of a list, whatever its pages, and the warnings."""
        asked = dict(query or {})
        entries: list[Any] = []
        warnings: list[str] = []
        while True:
            answer = read(await self.call("GET", path, query=asked), lambda f: f, "a list")
            page = answer.maybe(key, list)
            if page is None:
                raise ProtocolError(f"the server's list has no {key}")
            entries += page
            warnings += answer.texts("warnings")
            cursor = answer.maybe("next", str)
            if not cursor:
                return entries, warnings
            if cursor == asked.get("cursor"):
                raise ProtocolError("the server's list does not advance")
            asked["cursor"] = cursor

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        content: bytes | AsyncIterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        waits: bool = False,
        streams: bool = False,
        within: float | None = None,
    ) -> AsyncGenerator[AsyncResponse]:
        """An answer whose body is still to be read; `streams` takes the bound off the body. A refusal is raised."""
        request = self._request(method, path, query, content, headers or {}, waits=waits, within=within)
        response = await self._send(request)
        try:
            if not 200 <= response.status_code < 300:
                raise await self._refusal(response, method)
            if streams:
                request.extensions["timeout"]["read"] = None
            yield response
        except TransportError as exc:
            raise failure(exc, request, self.remote) from exc
        finally:
            await response.aclose()

    async def upgrade(self, path: str, query: Mapping[str, str] | None = None) -> AsyncSocket:
        """Opens a WebSocket. A refusal comes before it and is raised."""
        key = new_key()
        headers = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": key,
        }
        request = self._request("GET", path, query, None, headers, waits=False)
        response = await self._send(request)
        try:
            if response.status_code != 101:
                if 200 <= response.status_code < 300:
                    raise ProtocolError(f"{self.remote} answered a request for a stream without one")
                raise await self._refusal(response, "GET")
            answer = response.headers
            if answer.get("upgrade", "").lower() != "websocket" or answer.get("sec-websocket-accept") != accept_of(key):
                raise ProtocolError(f"{self.remote} did not complete the handshake of a WebSocket")
            if "sec-websocket-extensions" in answer or "sec-websocket-protocol" in answer:
                raise ProtocolError(f"{self.remote} chose a WebSocket extension or protocol that was not offered")
            return AsyncSocket(response)
        except TransportError as exc:
            await response.aclose()
            raise failure(exc, request, self.remote) from exc
        except BaseException:
            await response.aclose()
            raise

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        content: bytes | AsyncIterable[bytes] | None,
        headers: Mapping[str, str],
        *,
        waits: bool,
        within: float | None = None,
    ) -> Request:
        if self._closed:
            raise RuntimeError("this client is closed")
        if query:
            path += "?" + urlencode(query, quote_via=quote, safe="", errors="surrogateescape")
        timeout = min((t for t in (self._settings.timeout, within) if t is not None), default=None)
        extensions = {"timeout": bounds(timeout, read=not waits)}
        return self._client.request(method, path, content=content, headers=headers, extensions=extensions)

    async def _send(self, request: Request) -> AsyncResponse:
        await self._gate.acquire()
        held = [True]

        def let_go() -> None:
            if held:
                held.clear()
                self._gate.release()

        sending = AsyncSending[AsyncResponse]()

        async def trace(event: str, _: Mapping[str, Any]) -> None:
            if event.endswith("send_request_headers.started"):
                sending.begin()
            elif event.endswith("send_request_headers.complete"):
                let_go()

        async def send() -> AsyncResponse:
            return await self._client.send(request)

        async def drop(response: AsyncResponse) -> None:
            await response.aclose()

        request.extensions["trace"] = trace
        try:
            return await sending.wait(send, drop, self._strays)
        except TransportError as exc:
            raise failure(exc, request, self.remote) from exc
        finally:
            let_go()

    async def _read_all(self, response: AsyncResponse, *, waits: bool) -> bytes:
        """A whole body, within the client's bound also when it comes in drops."""
        timeout = self._settings.timeout
        deadline = None if waits or timeout is None else time.monotonic() + timeout
        data = bytearray()
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > _MAX_ANSWER:
                raise ProtocolError(f"the answer of {self.remote} is longer than {_MAX_ANSWER} bytes")
            if deadline is not None and time.monotonic() > deadline:
                raise ShardConnectionError(f"{self.remote} gave no whole answer within {timeout:g} s")
        return bytes(data)

    async def _refusal(self, response: AsyncResponse, method: str) -> ShardError:
        data = bytearray()
        try:
            async for chunk in response.aiter_raw():
                data += chunk
                if len(data) > 1 << 20:
                    break
        except TransportError:
            pass  # the status says what matters
        return refusal(response.status_code, bytes(data), head=method == "HEAD")
