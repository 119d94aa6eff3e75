"""Sandboxes for code that agents write: the Python client of `shard serve`.

`Shard` is for blocking code and any number of threads, `AsyncShard` for asyncio; both have the same methods.

Example:
    >>> from useshards import Shard
    >>> with Shard() as shard:
    ...     sandbox = shard.create("alpine:3.20", memory_mib=512)
    ...     try:
    ...         print(sandbox.exec(["echo", "hello"]).stdout.strip())
    ...     finally:
    ...         sandbox.remove(force=True)
    hello
"""

from __future__ import annotations

from ._async._command import AsyncCommand, AsyncCommands
from ._async._files import AsyncFiles
from ._async._process import AsyncEgressFollow, AsyncFileWatch, AsyncFollow, AsyncLogFollow, AsyncProcess, AsyncProcesses
from ._async._sandbox import AsyncPorts, AsyncSandbox
from ._async._shard import AsyncPolicies, AsyncSandboxList, AsyncSecrets, AsyncShard, AsyncSnapshots
from ._errors import (
    APIError,
    AuthenticationError,
    CommandNotStartedError,
    ConfigurationError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    ProtocolError,
    ServerError,
    ShardConnectionError,
    ShardError,
    UnknownLengthError,
    UnsafeArchiveError,
    UnsupportedError,
)
from ._models import (
    Capabilities,
    CommandInfo,
    CommandResult,
    EffectiveRule,
    Egress,
    EgressDecision,
    ExitStatus,
    FileEntry,
    FileEvent,
    FileInfo,
    HostAddress,
    OOMInfo,
    Policy,
    PolicyRule,
    Port,
    PortForward,
    ProcessInfo,
    ProcessStatus,
    ProviderInfo,
    Resources,
    Restart,
    SandboxInfo,
    SecretInfo,
    SecretList,
    Snapshot,
    TerminalSize,
    Version,
)
from ._output import DEFAULT_OUTPUT_LIMIT
from ._sync._command import Command, Commands
from ._sync._files import Files
from ._sync._process import EgressFollow, FileWatch, Follow, LogFollow, Process, Processes
from ._sync._sandbox import Ports, Sandbox
from ._sync._shard import Policies, SandboxList, Secrets, Shard, Snapshots
from ._version import __version__

__all__ = [
    "DEFAULT_OUTPUT_LIMIT",
    "APIError",
    "AsyncCommand",
    "AsyncCommands",
    "AsyncEgressFollow",
    "AsyncFileWatch",
    "AsyncFiles",
    "AsyncFollow",
    "AsyncLogFollow",
    "AsyncPolicies",
    "AsyncPorts",
    "AsyncProcess",
    "AsyncProcesses",
    "AsyncSandbox",
    "AsyncSandboxList",
    "AsyncSecrets",
    "AsyncShard",
    "AsyncSnapshots",
    "AuthenticationError",
    "Capabilities",
    "Command",
    "CommandInfo",
    "CommandNotStartedError",
    "CommandResult",
    "Commands",
    "ConfigurationError",
    "ConflictError",
    "EffectiveRule",
    "Egress",
    "EgressDecision",
    "EgressFollow",
    "ExitStatus",
    "FileEntry",
    "FileEvent",
    "FileInfo",
    "FileWatch",
    "Files",
    "Follow",
    "HostAddress",
    "InvalidRequestError",
    "LogFollow",
    "NotFoundError",
    "OOMInfo",
    "PermissionDeniedError",
    "Policies",
    "Policy",
    "PolicyRule",
    "Port",
    "PortForward",
    "Ports",
    "Process",
    "ProcessInfo",
    "ProcessStatus",
    "Processes",
    "ProtocolError",
    "ProviderInfo",
    "Resources",
    "Restart",
    "Sandbox",
    "SandboxInfo",
    "SandboxList",
    "SecretInfo",
    "SecretList",
    "Secrets",
    "ServerError",
    "Shard",
    "ShardConnectionError",
    "ShardError",
    "Snapshot",
    "Snapshots",
    "TerminalSize",
    "UnknownLengthError",
    "UnsafeArchiveError",
    "UnsupportedError",
    "Version",
    "__version__",
]
