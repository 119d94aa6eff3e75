"""The client's half of RFC 6455, without I/O: bytes in, messages out, and the other way round.

No extension is ever offered, so the reserved bits are 0. Whatever breaks the rules is a ProtocolError.
"""

from __future__ import annotations

import base64
import hashlib
import os

from attrs import frozen

from ._errors import ProtocolError

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA

# The longest message that is taken, in bytes. The server sends at most 1 MiB and one byte.
MAX_MESSAGE = 4 << 20

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


@frozen
class Message:
    """A whole message, or a control frame."""

    opcode: int
    data: bytes


def new_key() -> str:
    """A Sec-WebSocket-Key."""
    return base64.b64encode(os.urandom(16)).decode()


def accept_of(key: str) -> str:
    """The Sec-WebSocket-Accept that answers a key."""
    return base64.b64encode(hashlib.sha1(key.encode() + _GUID, usedforsecurity=False).digest()).decode()


def encode(opcode: int, payload: bytes, mask: bytes | None = None) -> bytes:
    """One final, masked frame. `mask` is four bytes, random unless given."""
    mask = os.urandom(4) if mask is None else mask
    size = len(payload)
    if size < 126:
        head = bytes((0x80 | opcode, 0x80 | size))
    elif size < 1 << 16:
        head = bytes((0x80 | opcode, 0x80 | 126)) + size.to_bytes(2, "big")
    else:
        head = bytes((0x80 | opcode, 0x80 | 127)) + size.to_bytes(8, "big")
    return head + mask + _masked(payload, mask)


def _masked(data: bytes, mask: bytes) -> bytes:
    # One XOR of two big integers: the fastest way that needs no C of our own.
    size = len(data)
    key = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(data, "big") ^ int.from_bytes(key, "big")).to_bytes(size, "big")


def close_reason(message: Message) -> tuple[int, str]:
    """Code and reason of a close message; 1005 when it carries none."""
    if not message.data:
        return 1005, ""
    return int.from_bytes(message.data[:2], "big"), message.data[2:].decode()


class Decoder:
    """Turns what a server sent into messages. Feed it, then take messages until there is none."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._opcode = 0  # of the message whose fragments are being gathered; 0 is none
        self._parts = bytearray()

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the connection."""
        self._buffer += data

    def next(self) -> Message | None:
        """The next whole message or control frame, None when more bytes are needed."""
        while True:
            frame = self._frame()
            if frame is None:
                return None
            final, opcode, payload = frame
            if opcode >= CLOSE:
                if opcode == CLOSE:
                    _check_close(payload)
                return Message(opcode, payload)
            if (opcode == CONTINUATION) != (self._opcode != 0):
                raise ProtocolError("the server's stream has a fragment where none belongs")
            self._opcode = opcode or self._opcode
            if final and not self._parts:
                whole = payload
            else:
                self._parts += payload
                if len(self._parts) > MAX_MESSAGE:
                    raise ProtocolError(f"the server sent a message of more than {MAX_MESSAGE} bytes")
                if not final:
                    continue
                whole = bytes(self._parts)
                self._parts.clear()
            opcode, self._opcode = self._opcode, 0
            if opcode == TEXT:
                try:
                    whole.decode()
                except UnicodeDecodeError:
                    raise ProtocolError("the server sent text that is not UTF-8") from None
            return Message(opcode, whole)

    def _frame(self) -> tuple[bool, int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        final, opcode, size, at = bool(buffer[0] & 0x80), buffer[0] & 0x0F, buffer[1] & 0x7F, 2
        if buffer[0] & 0x70:
            raise ProtocolError("the server's frame has a reserved bit set")
        if buffer[1] & 0x80:
            raise ProtocolError("the server's frame is masked")
        if opcode not in (CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG):
            raise ProtocolError(f"the server's frame has the unknown opcode {opcode:#x}")
        if opcode >= CLOSE and (size > 125 or not final):
            raise ProtocolError("the server's control frame is too long or fragmented")
        if size >= 126:
            width = 2 if size == 126 else 8
            if len(buffer) < at + width:
                return None
            size = int.from_bytes(buffer[at : at + width], "big")
            at += width
        if size > MAX_MESSAGE:
            raise ProtocolError(f"the server sent a message of more than {MAX_MESSAGE} bytes")
        if len(buffer) < at + size:
            return None
        payload = bytes(memoryview(buffer)[at : at + size])
        del buffer[: at + size]
        return final, opcode, payload


def _check_close(payload: bytes) -> None:
    if not payload:
        return
    code = int.from_bytes(payload[:2], "big")
    if len(payload) == 1 or code < 1000 or code in (1004, 1005, 1006) or 1014 < code < 3000 or code > 4999:
        raise ProtocolError("the server's close frame has no valid code")
    try:
        payload[2:].decode()
    except UnicodeDecodeError:
        raise ProtocolError("the server's close frame has a reason that is not UTF-8") from None
