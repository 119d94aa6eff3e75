"""Reads the server's JSON. A field that is missing or of another kind is a ProtocolError that names it; an unknown
field is nobody's business."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

from ._errors import ProtocolError

T = TypeVar("T")


class Fields:
    """One JSON object and what it is, for messages."""

    def __init__(self, value: Any, what: str) -> None:
        if not isinstance(value, dict):
            raise ProtocolError(f"the server's answer holds something else where {what} belongs")
        self._value: dict[str, Any] = value
        self._what = what

    def _get(self, key: str, kind: type[T]) -> T:
        found = self.maybe(key, kind)
        if found is None:
            raise ProtocolError(f"the server's answer has no {key} in {self._what}")
        return found

    def maybe(self, key: str, kind: type[T]) -> T | None:
        """A field of a kind, None when it is absent or null."""
        found = self._value.get(key)
        if found is None:
            return None
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            raise ProtocolError(f"the server's answer has something else as {key} of {self._what}")
        return found

    def text(self, key: str) -> str:
        """A string that must be there."""
        return self._get(key, str)

    def number(self, key: str) -> int:
        """A whole number that must be there."""
        return self._get(key, int)

    def real(self, key: str) -> float:
        """A number, 0 when absent."""
        found = self._value.get(key)
        return float(found) if isinstance(found, int) and not isinstance(found, bool) else (self.maybe(key, float) or 0.0)

    def flag(self, key: str) -> bool:
        """A boolean, False when absent."""
        return self.maybe(key, bool) or False

    def texts(self, key: str) -> list[str]:
        """A list of strings, empty when absent."""
        found = self.maybe(key, list) or []
        if not all(isinstance(item, str) for item in found):
            raise ProtocolError(f"the server's answer has something else in {key} of {self._what}")
        return found

    def time(self, key: str) -> datetime:
        """An RFC 3339 time that must be there."""
        found = self.maybe_time(key)
        if found is None:
            raise ProtocolError(f"the server's answer has no {key} in {self._what}")
        return found

    def maybe_time(self, key: str) -> datetime | None:
        """An RFC 3339 time, None when absent."""
        text = self.maybe(key, str)
        if text is None:
            return None
        try:
            found = datetime.fromisoformat(text)
        except ValueError:
            found = None
        if found is None or found.tzinfo is None:
            raise ProtocolError(f"the server's answer has no valid time as {key} of {self._what}")
        return found

    def object(self, key: str, read: Callable[[Fields], T], what: str) -> T:
        """An object that must be there."""
        return read(Fields(self._value.get(key), what))

    def maybe_object(self, key: str, read: Callable[[Fields], T], what: str) -> T | None:
        """An object, None when absent."""
        return None if self._value.get(key) is None else self.object(key, read, what)

    def objects(self, key: str, read: Callable[[Fields], T], what: str) -> list[T]:
        """A list of objects, empty when absent."""
        return [read(Fields(item, what)) for item in self.maybe(key, list) or []]
