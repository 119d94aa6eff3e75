"""Every exception of the SDK, and how an answer of the server becomes one of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

__all__ = [
    "APIError",
    "AuthenticationError",
    "CommandNotStartedError",
    "ConfigurationError",
    "ConflictError",
    "InvalidRequestError",
    "NotFoundError",
    "PermissionDeniedError",
    "ProtocolError",
    "ServerError",
    "ShardConnectionError",
    "ShardError",
    "UnknownLengthError",
    "UnsafeArchiveError",
    "UnsupportedError",
]

# What an answer that is not ours may add to a message, in bytes.
QUOTED = 512

# The status that each code of a stream's closing error implies; an unknown code counts as 500.
_STATUS_OF = {
    "invalid_request": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "no_process": 404,
    "sandbox_not_running": 409,
    "sandbox_not_stopped": 409,
    "sandbox_not_paused": 409,
    "sandbox_live": 409,
    "sandbox_failed": 409,
    "no_checkpoint": 409,
    "unsupported": 409,
    "in_use": 409,
    "name_taken": 409,
    "exec_exited": 409,
    "exec_running": 409,
    "process_limit": 409,
    "body_too_large": 413,
    "command_not_started": 422,
    "exec_limit": 429,
    "internal": 500,
    "timeout": 504,
}


class ShardError(Exception):
    """The root of every error that comes from the server, the connection or the settings.

    Example:
        >>> try:
        ...     raise NotFoundError(404, "not_found", "there is no sandbox web")
        ... except ShardError as error:
        ...     print(error)
        404 not_found: there is no sandbox web
    """


class ConfigurationError(ShardError):
    """A setting is missing or refused. The message names the setting and never shows the API key.

    Example:
        >>> from useshards import Shard
        >>> Shard(remote="ftp://example.com", api_key="k")
        Traceback (most recent call last):
        useshards.ConfigurationError: remote: the scheme "ftp" is not http or https
    """


class ShardConnectionError(ShardError):
    """The server is not reachable, did not answer in time, or a stream ended before what it carries did.

    A command that this happens to keeps running.

    Example:
        >>> raise ShardConnectionError("no answer within 60 s")
        Traceback (most recent call last):
        useshards.ShardConnectionError: no answer within 60 s
    """


class ProtocolError(ShardError):
    """The server's answer cannot be read: it is not JSON, lacks a field, or breaks the stream's rules.

    Example:
        >>> raise ProtocolError("the answer is not JSON")
        Traceback (most recent call last):
        useshards.ProtocolError: the answer is not JSON
    """


class CommandNotStartedError(ShardError):
    """A command or process never ran.

    Attributes:
        exit_code: What a shell would report: 127 when the program does not exist, 126 when it cannot run.
        reason: Why, as the server says it.

    Example:
        >>> raise CommandNotStartedError(127, "nosuch: not found")
        Traceback (most recent call last):
        useshards.CommandNotStartedError: nosuch: not found (exit code 127)
    """

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(exit_code, reason)
        self.exit_code = exit_code
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason} (exit code {self.exit_code})"


class UnknownLengthError(ShardError):
    """What is to be sent has no known length: it cannot be measured, or it grew or shrank on the way.

    Nothing was written: a file appears in the sandbox complete or not at all.

    Example:
        >>> raise UnknownLengthError("the stream cannot seek: pass size=")
        Traceback (most recent call last):
        useshards.UnknownLengthError: the stream cannot seek: pass size=
    """


class UnsafeArchiveError(ShardError):
    """A directory that came out of a sandbox holds something that must not land on this machine.

    Attributes:
        entry: The entry's name in the archive, "" when the archive itself is at fault.
        reason: What is wrong with it.

    Example:
        >>> raise UnsafeArchiveError("../x", 'has ".." in its name')
        Traceback (most recent call last):
        useshards.UnsafeArchiveError: ../x: has ".." in its name
    """

    def __init__(self, entry: str, reason: str) -> None:
        super().__init__(entry, reason)
        self.entry = entry
        self.reason = reason

    def __str__(self) -> str:
        # The name is the archive's: bytes that are not text must not break whoever prints it.
        entry = self.entry.encode("utf-8", "backslashreplace").decode("utf-8")
        return f"{entry}: {self.reason}" if entry else self.reason


class APIError(ShardError):
    """The server refused the request. Its subclasses say why; `code` says it most exactly.

    Attributes:
        status: The HTTP status.
        code: The contract's code, such as "not_found". "" when the answer carried none. New codes may appear.
        message: What is wrong and what to do.
        holders: With code "in_use": the names of what keeps the object in use, else empty.

    Example:
        >>> error = APIError(429, "exec_limit", "32 commands run already")
        >>> print(error.status, error.code)
        429 exec_limit
    """

    def __init__(self, status: int, code: str, message: str, holders: Sequence[str] = ()) -> None:
        super().__init__(status, code, message, list(holders))
        self.status = status
        self.code = code
        self.message = message
        self.holders = list(holders)

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}" if self.code else f"{self.status}: {self.message}"


class InvalidRequestError(APIError):
    """400 or 413: the request is wrong as it stands; the message says where.

    Example:
        >>> print(InvalidRequestError(400, "invalid_request", "vcpus must not be negative"))
        400 invalid_request: vcpus must not be negative
    """


class AuthenticationError(APIError):
    """401: the API key is missing, unknown, expired or revoked.

    Example:
        >>> print(AuthenticationError(401, "unauthorized", "the token is not valid"))
        401 unauthorized: the token is not valid
    """


class PermissionDeniedError(APIError):
    """403: the API key's scopes do not cover the request.

    Example:
        >>> print(PermissionDeniedError(403, "forbidden", "the token lacks the scope exec"))
        403 forbidden: the token lacks the scope exec
    """


class NotFoundError(APIError):
    """404: there is no such sandbox, command, process, path, snapshot, policy or secret.

    Example:
        >>> print(NotFoundError(404, "not_found", "there is no sandbox web"))
        404 not_found: there is no sandbox web
    """


class ConflictError(APIError):
    """409: the object's state or another object stands in the way; `code` says which.

    Example:
        >>> print(ConflictError(409, "name_taken", "another sandbox is named web"))
        409 name_taken: another sandbox is named web
    """


class UnsupportedError(APIError):
    """The sandbox's provider does not have this verb (code "unsupported").

    Example:
        >>> print(UnsupportedError(409, "unsupported", "provider runc cannot fork a sandbox"))
        409 unsupported: provider runc cannot fork a sandbox
    """


class ServerError(APIError):
    """500 and above: the server failed; its log says more.

    Example:
        >>> print(ServerError(500, "internal", "internal error"))
        500 internal: internal error
    """


_CLASS_OF = {
    400: InvalidRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    413: InvalidRequestError,
}


def api_error(status: int, code: str, message: str, holders: Sequence[str] = ()) -> APIError:
    """The exception for a status and a code."""
    if code == "unsupported":
        return UnsupportedError(status, code, message, holders)
    if status >= 500:
        return ServerError(status, code, message, holders)
    return _CLASS_OF.get(status, APIError)(status, code, message, holders)


def refusal(status: int, body: bytes, *, head: bool = False) -> ShardError:
    """The exception that an answer with an error status carries."""
    if head:
        return api_error(status, "", "the server refused the request")
    try:
        detail = json.loads(body)["error"]
        code, message = detail["code"], detail["message"]
        if not isinstance(code, str) or not isinstance(message, str):
            raise TypeError
    except (ValueError, LookupError, TypeError, RecursionError):
        quoted = body[:QUOTED].decode("utf-8", "backslashreplace")
        return api_error(status, "", f"the server answered {quoted!r}" if quoted else "the server gave no reason")
    return detail_error(status, detail)


def detail_error(status: int | None, detail: dict[str, Any]) -> ShardError:
    """The exception for an error object, whose code implies the status where there is none (a stream's last message)."""
    code, message = detail["code"], detail["message"]
    if status is None:
        status = _STATUS_OF.get(code, 500)
    exit_code = detail.get("exit_code")
    if code == "command_not_started":
        return CommandNotStartedError(exit_code if isinstance(exit_code, int) else 126, message)
    holders = detail.get("holders")
    named = [h for h in holders if isinstance(h, str)] if isinstance(holders, list) else []
    return api_error(status, code, message, named)


# Tracebacks and pickles name a class by where people import it from.
for _name in __all__:
    globals()[_name].__module__ = "useshards"
