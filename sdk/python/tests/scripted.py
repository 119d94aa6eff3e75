"""A server that does what a scenario of conformance/ says, byte for byte. See conformance/README.md."""

from __future__ import annotations

import base64
import hashlib
import json
import select
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

CONFORMANCE = Path(__file__).resolve().parents[3] / "conformance"
BOX: dict[str, Any] = json.loads((CONFORMANCE / "scenarios/box.json").read_text())
BOX_PATH = f"/v0/sandboxes/{BOX['id']}"


def text_of(value: Any) -> str:
    """A string, or a repetition of one."""
    return value["$repeat"][0] * value["$repeat"][1] if isinstance(value, dict) else str(value)


def frame(opcode: int, payload: bytes) -> bytes:
    size = len(payload)
    head = bytes([0x80 | opcode])
    if size < 126:
        return head + bytes([size]) + payload
    if size < 1 << 16:
        return head + b"\x7e" + size.to_bytes(2, "big") + payload
    return head + b"\x7f" + size.to_bytes(8, "big") + payload


class Cut(Exception):
    """The server has cut the connection, as it was asked to."""


class ScriptedServer:
    """Serves the exchanges of one scenario, each once and in any order; `cut` ends the whole server after so many bytes."""

    def __init__(
        self, exchanges: list[dict[str, Any]], *, bytewise: bool = False, cut: int | None = None, **options: Any
    ) -> None:
        self.exchanges = [dict(e) for e in exchanges]
        self.bytewise = bytewise
        self.cut = cut
        self.loose_query = bool(options.get("loose_query"))
        self.tls: ssl.SSLContext | None = options.get("tls")
        self.sent = 0
        self.essential = 0
        self.problems: list[str] = []
        self.requests = 0
        self._lock = threading.Lock()
        self._closing = False
        self._closed = threading.Event()
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self._listener.getsockname()[1]
        self.remote = f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"
        self._spawn(self._accept)

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join(10)

    def unused(self) -> list[str]:
        """The exchanges that nobody asked for."""
        return [f"{e['method']} {e['path']}" for e in self.exchanges if not e.get("always") and not e.get("used")]

    def _spawn(self, work: Any, *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.tls:
                connection = self.tls.wrap_socket(connection, server_side=True)
            self._connections.add(connection)
            Exchange(self, connection).run()
        except (Cut, OSError):
            pass
        except Exception as exc:
            self.problems.append(repr(exc))
        finally:
            self._connections.discard(connection)
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            connection.close()

    def match(self, method: str, target: str, query: dict[str, str]) -> dict[str, Any]:
        with self._lock:
            self.requests += 1
            for exchange in self.exchanges:
                path = exchange["path"].replace("{box}", BOX_PATH)
                if exchange["method"] != method or path != target or exchange.get("done"):
                    continue
                if not self.loose_query and exchange.get("query", {}) != query and not exchange.get("always"):
                    continue
                exchange["used"] = exchange.get("used", 0) + 1
                if exchange["used"] >= exchange.get("times", 1) and not exchange.get("always"):
                    exchange["done"] = True
                return exchange
        if method == "GET" and target in (BOX_PATH, "/v0/sandboxes/box"):
            return {"answer": BOX, "always": True}
        if self.cut is None:
            self.problems.append(f"nobody expects {method} {target} {query}")
        return {"status": 404, "answer": {"error": {"code": "not_found", "message": "not in the scenario"}}, "always": True}


class Exchange:
    """One request and its answer."""

    def __init__(self, server: ScriptedServer, connection: socket.socket) -> None:
        self.server = server
        self.connection = connection
        self.buffer = b""
        self.counted = False
        self.input = b""
        self.messages = 0
        self.pongs: list[bytes] = []
        self.ended = False

    # --- bytes

    def fill(self) -> None:
        data = self.connection.recv(1 << 16)
        if not data:
            raise Cut
        self.buffer += data

    def take(self, size: int) -> bytes:
        while len(self.buffer) < size:
            self.fill()
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return data

    def send(self, data: bytes, *, essential: bool = True) -> None:
        server = self.server
        if not self.counted:
            self.connection.sendall(data)
            return
        with server._lock:
            left = None if server.cut is None else max(0, server.cut - server.sent)
            server.sent += len(data)
            if essential:
                server.essential = server.sent
        if left is not None and left < len(data):
            self.connection.sendall(data[:left])
            raise Cut
        if server.bytewise and len(data) < 4096:
            for at in range(len(data)):
                self.connection.sendall(data[at : at + 1])
        else:
            self.connection.sendall(data)

    # --- HTTP

    def run(self) -> None:
        while b"\r\n\r\n" not in self.buffer:
            self.fill()
        head, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
        lines = head.decode().split("\r\n")
        method, target, _ = lines[0].split(" ")
        headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines[1:])}
        parts = urlsplit(target)
        exchange = self.server.match(method, parts.path, dict(parse_qsl(parts.query, keep_blank_values=True)))
        self.counted = not exchange.get("always")
        if not exchange.get("early"):
            self.check(exchange, headers, self.body(headers))
        for name, value in exchange.get("request_headers", {}).items():
            if headers.get(name) != value:
                self.server.problems.append(f"{method} {target}: header {name} is {headers.get(name)!r}")
        self.server._closed.wait(exchange.get("delay_ms", 0) / 1000)
        if "raw_bytes" in exchange:
            self.send(exchange["raw_bytes"].encode())
        elif "stream" in exchange or "accept" in exchange or (exchange.get("upgrade") and "status" not in exchange):
            self.upgrade(exchange, headers)
        else:
            self.answer(method, exchange)
        if exchange.get("early"):
            self.connection.shutdown(socket.SHUT_WR)
            while True:
                self.fill()

    def body(self, headers: dict[str, str]) -> bytes:
        return self.take(int(headers.get("content-length", 0)))

    def check(self, exchange: dict[str, Any], headers: dict[str, str], body: bytes) -> None:
        where = f"{exchange.get('method')} {exchange.get('path')}"
        if "json" in exchange and json.loads(body or b"null") != exchange["json"]:
            self.server.problems.append(f"{where}: the body is {body[:300]!r}")
        if "body" in exchange and body.decode() != exchange["body"]:
            self.server.problems.append(f"{where}: the body is {body[:300]!r}")
        if exchange.get("no_body") and body.strip() not in (b"", b"{}"):
            self.server.problems.append(f"{where}: there is a body, {body[:300]!r}")
        if "json" in exchange and headers.get("content-type") != "application/json":
            self.server.problems.append(f"{where}: the body has no content type")

    def answer(self, method: str, exchange: dict[str, Any]) -> None:
        status = exchange.get("status", 200)
        body = exchange["raw_answer"].encode() if "raw_answer" in exchange else b""
        if "answer" in exchange:
            body = json.dumps(exchange["answer"]).encode()
        head = f"HTTP/1.1 {status} X\r\nConnection: close\r\n"
        for name, value in exchange.get("headers", {}).items():
            head += f"{name}: {value}\r\n"
        if exchange.get("chunked"):
            half = len(body) // 2
            pieces = [p for p in (body[:half], body[half:]) if p]
            body = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + (
                b"" if exchange.get("unfinished") else b"0\r\n\r\n"
            )
            head += "Transfer-Encoding: chunked\r\n"
        elif status != 204:
            head += f"Content-Length: {len(body)}\r\n"
        data = head.encode() + b"\r\n" + (b"" if method == "HEAD" else body)
        if "drip_ms" in exchange:
            self.send(head.encode() + b"\r\n")
            for at in range(len(body)):
                self.send(body[at : at + 1])
                if self.server._closed.wait(exchange["drip_ms"] / 1000):
                    return
        else:
            self.send(data)

    # --- WebSocket

    def upgrade(self, exchange: dict[str, Any], headers: dict[str, str]) -> None:
        for name, value in (("connection", "upgrade"), ("upgrade", "websocket"), ("sec-websocket-version", "13")):
            if headers.get(name, "").lower() != value:
                self.server.problems.append(f"{exchange['path']}: the header {name} is {headers.get(name)!r}")
        key = headers.get("sec-websocket-key", "")
        digest = hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        accept = exchange.get("accept", base64.b64encode(digest).decode())
        head = f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {accept}\r\n"
        for name, value in exchange.get("headers", {}).items():
            head += f"{name}: {value}\r\n"
        self.send(head.encode() + b"\r\n")
        for step in exchange.get("stream", []):
            self.step(step, exchange)
        self.await_end()

    def step(self, step: dict[str, Any], exchange: dict[str, Any]) -> None:
        if "binary" in step:
            payload = (
                bytes.fromhex(step["hex"]) if "hex" in step else json.dumps(step["json"]).encode() if "json" in step else b""
            )
            if "text" in step:
                payload = text_of(step["text"]).encode()
            self.send(frame(2, bytes([step["binary"]]) + payload))
        elif "binary_empty" in step:
            self.send(frame(2, b""))
        elif "text_message" in step:
            self.send(frame(1, step["text_message"].encode()))
        elif "raw" in step:
            self.send(bytes.fromhex(step["raw"]))
        elif "ping" in step:
            self.send(frame(9, step["ping"].encode()))
        elif "close" in step:
            # After a last message a close says nothing new; of decisions it is the last message itself.
            last = any(s.get("binary") in (3, 5) for s in exchange["stream"])
            self.send(frame(8, step["close"].to_bytes(2, "big") + step.get("reason", "").encode()), essential=not last)
        elif "pause_ms" in step:
            self.server._closed.wait(step["pause_ms"] / 1000)
        elif "cut" in step:
            raise Cut
        elif "expect_input" in step:
            want = text_of(step["expect_input"]).encode()
            while len(self.input) < len(want):
                self.message(step.get("pieces_of_at_most"))
            if self.input != want:
                self.server.problems.append(f"the input is {self.input[:100]!r}")
            self.input = b""
        elif "expect_end_of_input" in step:
            while not self.ended:
                self.message(None)
            if self.input:
                self.server.problems.append(f"there is more input: {self.input[:100]!r}")
        elif "expect_silence_ms" in step:
            until = time.monotonic() + step["expect_silence_ms"] / 1000
            while (left := until - time.monotonic()) > 0:
                if self.buffer or select.select([self.connection], [], [], left)[0]:
                    self.message(None)
        elif "expect_pong" in step:
            while step["expect_pong"].encode() not in self.pongs:
                self.message(None)
        elif "expect_gone" in step:
            try:
                while True:
                    self.message(None)
            except (Cut, OSError):
                raise Cut from None
        elif "wait_for" in step:
            self.wait_requests(step["wait_for"])
        else:
            raise ValueError(f"unknown step {step}")

    def wait_requests(self, count: int) -> None:
        """Waits until so many plain requests about commands came."""

        def seen() -> int:
            return sum(e.get("used", 0) for e in self.server.exchanges if e["method"] == "POST" and "/e1/" in e["path"])

        deadline = time.monotonic() + 20
        while seen() < count and time.monotonic() < deadline and not self.server._closing:
            time.sleep(0.005)

    def message(self, most: int | None) -> None:
        """Reads one frame of the client, which must be masked."""
        first, second = self.take(2)
        size = second & 0x7F
        if not second & 0x80:
            self.server.problems.append("the client sent a frame that is not masked")
        if size == 126:
            size = int.from_bytes(self.take(2), "big")
        elif size == 127:
            size = int.from_bytes(self.take(8), "big")
        mask = self.take(4)
        raw = self.take(size)
        key = (mask * (size // 4 + 1))[:size]
        payload = (int.from_bytes(raw, "big") ^ int.from_bytes(key, "big")).to_bytes(size, "big")
        opcode = first & 0x0F
        if opcode == 8:
            raise Cut
        if opcode == 10:
            self.pongs.append(payload)
        elif opcode == 9:
            self.connection.sendall(frame(10, payload))
        elif payload[:1] == b"\x00":
            self.input += payload[1:]
            if most and len(payload) - 1 > most:
                self.server.problems.append(f"a piece of input has {len(payload) - 1} bytes")
        elif payload == b"\x04":
            self.ended = True
        else:
            self.server.problems.append(f"the client sent {payload[:20]!r}")

    def await_end(self) -> None:
        """Reads until the client is gone, so that what was sent last is not lost with the connection."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            ready, _, _ = select.select([self.connection], [], [], 0.1)
            if self.server._closing or (ready and not self.connection.recv(1 << 16)):
                return
