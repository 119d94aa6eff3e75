"""What is kept of a command's output: the newest bytes of both streams together, and its text."""

from __future__ import annotations

from collections import deque

# How many of the newest bytes of stdout and stderr together a result keeps unless asked otherwise: 8 MiB.
DEFAULT_OUTPUT_LIMIT = 8 << 20

STDOUT, STDERR = 1, 2

# Small chunks of one stream are gathered up to this size, in bytes: output that came byte by byte costs no more memory.
_SEGMENT = 64 << 10


class Output:
    """Keeps the newest `limit` bytes of two streams, in the order in which they arrived."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._segments: deque[tuple[int, bytearray]] = deque()
        self._cut: set[int] = set()

    def add(self, stream: int, data: bytes) -> None:
        """Takes the next chunk of a stream and drops what is too old."""
        if not data:
            return
        if self._segments and self._segments[-1][0] == stream and len(self._segments[-1][1]) < _SEGMENT:
            self._segments[-1][1].extend(data)
        else:
            self._segments.append((stream, bytearray(data)))
        self._held += len(data)
        while self._held > self._limit:
            oldest, held = self._segments[0]
            drop = min(self._held - self._limit, len(held))
            self._cut.add(oldest)
            self._held -= drop
            if drop == len(held):
                self._segments.popleft()
            else:
                del held[:drop]

    def clear(self) -> None:
        """Forgets everything: a stream that is attached again begins anew."""
        self._segments.clear()
        self._cut.clear()
        self._held = 0

    def data(self, stream: int) -> bytes:
        """The kept bytes of one stream."""
        return b"".join(held for s, held in self._segments if s == stream)

    def text(self, stream: int, data: bytes, *, lost: bool) -> str:
        """Bytes as text: what is not UTF-8 becomes U+FFFD. A character that was cut at the front is one mark, not three."""
        if lost or stream in self._cut:
            tail = 0
            while tail < min(3, len(data)) and data[tail] & 0xC0 == 0x80:
                tail += 1
            if tail:
                return "\ufffd" + data[tail:].decode("utf-8", "replace")
        return data.decode("utf-8", "replace")
