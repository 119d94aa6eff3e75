"""The values that the SDK takes and returns. All are immutable; fields that a server may leave out are None."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import datetime

from attrs import field, frozen

from ._records import Fields

__all__ = [
    "Capabilities",
    "CommandInfo",
    "CommandResult",
    "EffectiveRule",
    "Egress",
    "EgressDecision",
    "ExitStatus",
    "FileEntry",
    "FileEvent",
    "FileInfo",
    "HostAddress",
    "OOMInfo",
    "Policy",
    "PolicyRule",
    "Port",
    "PortForward",
    "ProcessInfo",
    "ProcessStatus",
    "ProviderInfo",
    "Resources",
    "Restart",
    "SandboxInfo",
    "SecretInfo",
    "SecretList",
    "Snapshot",
    "TerminalSize",
    "Version",
]


def _port_number(_: object, attribute: object, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 65536:
        raise ValueError(f"{getattr(attribute, 'name', 'port')} must be a whole number from 1 to 65535")


def _cells(_: object, attribute: object, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 65536:
        raise ValueError(f"{getattr(attribute, 'name', 'size')} must be a whole number from 0 to 65535")


@frozen
class PortForward:
    """A host port that is forwarded to a port on the sandbox's 127.0.0.1.

    Attributes:
        host_port: 1 to 65535, one forward per host port.
        guest_port: 1 to 65535.
        public: Whether the host listens on 0.0.0.0; else on 127.0.0.1 only. Default False.

    Raises:
        ValueError: A port is out of range.

    Example:
        >>> PortForward(9000, 8000)
        PortForward(host_port=9000, guest_port=8000, public=False)
    """

    host_port: int = field(validator=_port_number)
    guest_port: int = field(validator=_port_number)
    public: bool = False


@frozen
class TerminalSize:
    """The size of a terminal in character cells, each 0 to 65535.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> TerminalSize(40, 120)
        TerminalSize(rows=40, cols=120)
    """

    rows: int = field(validator=_cells)
    cols: int = field(validator=_cells)


@frozen
class Restart:
    """When the supervisor starts a process again.

    Attributes:
        policy: "no", "on-failure", "always" or "unless-stopped".
        retries: With "on-failure": how many times in a row; 0, the default, is without a cap.
        backoff: The first wait in seconds, up to 60; 0, the default, is 1 s. Each further wait doubles, up to 60 s.

    Raises:
        ValueError: A number is negative or the backoff is above 60.

    Example:
        >>> Restart("on-failure", retries=3)
        Restart(policy='on-failure', retries=3, backoff=0)
    """

    policy: str
    retries: int = 0
    backoff: float = 0

    def __attrs_post_init__(self) -> None:
        if self.retries < 0:
            raise ValueError("retries must not be negative")
        if not 0 <= self.backoff <= 60:
            raise ValueError("backoff must be from 0 to 60 seconds")


@frozen
class PolicyRule:
    """One rule of a network policy; the first that matches decides, and what none matches is denied.

    Attributes:
        action: "allow" or "deny".
        rule: `DEST [tcp|udp[:PORTS]]`, such as "api.example.com", "suffix:example.com tcp:443" or "any".

    Example:
        >>> PolicyRule("allow", "suffix:example.com tcp:443")
        PolicyRule(action='allow', rule='suffix:example.com tcp:443')
    """

    action: str
    rule: str


@frozen
class ExitStatus:
    """How a process ended: its exit code, and the number of the signal that ended it or 0.

    Example:
        >>> ExitStatus(code=0, signal=15)
        ExitStatus(code=0, signal=15)
    """

    code: int
    signal: int


@frozen
class CommandResult:
    """How a command ended and the newest of its output.

    Attributes:
        id: The command's id.
        exit_code: Its exit code; 128 plus the number for a death by signal.
        signal: Always None: a signal shows in the exit code.
        stdout, stderr: The newest output as text; what is not UTF-8 shows as U+FFFD.
        stdout_bytes, stderr_bytes: The same as it came.
        lost_bytes: Output in bytes that the daemon dropped before any client read it.

    Example:
        >>> result = sandbox.exec(["echo", "hello"])
        >>> print(result.exit_code, result.stdout.strip())
        0 hello
    """

    id: str
    exit_code: int
    signal: int | None
    stdout: str
    stderr: str
    stdout_bytes: bytes = field(repr=False)
    stderr_bytes: bytes = field(repr=False)
    lost_bytes: int


@frozen
class CommandInfo:
    """The daemon's record of a command.

    Attributes:
        id: The command's id.
        sandbox: The id of its sandbox.
        command: Its arguments.
        state: "running" or "exited".
        exit_code: None while it runs.
        signal: Always None: a signal shows in the exit code as 128 plus its number.
        started_at, exited_at: Times; `exited_at` is None while it runs.
        lost_bytes: Output in bytes that the daemon dropped before any client read it.

    Example:
        >>> for info in sandbox.commands.list():
        ...     print(info.id, info.state, info.exit_code)
    """

    id: str
    sandbox: str
    command: list[str]
    state: str
    exit_code: int | None
    signal: int | None
    started_at: datetime
    exited_at: datetime | None
    lost_bytes: int


@frozen
class ProcessStatus:
    """Where a process stands.

    Attributes:
        state: "running", "restarting", "exited", "killed", "gave-up" or "stopped".
        restarts: How often it was started again since it was run or the sandbox started.
        exit: How it last ended, None before.
        started_at: When it last started, None before.

    Example:
        >>> process.inspect().status.state
        'running'
    """

    state: str
    restarts: int
    exit: ExitStatus | None
    started_at: datetime | None


@frozen
class ProcessInfo:
    """The record of a named process.

    Attributes:
        name: Its name within the sandbox.
        command: Its arguments.
        restart: When it is started again.
        killed: Whether kill() ended it.
        status: Where it stands.
        env: Variables of its own, as "NAME=value".
        workdir, user: Its own, None for the sandbox's.

    Example:
        >>> [p.name for p in sandbox.processes.list()]
        ['ticker']
    """

    name: str
    command: list[str]
    restart: Restart
    killed: bool
    status: ProcessStatus
    env: list[str]
    workdir: str | None
    user: str | None


@frozen
class Resources:
    """The bounds of a sandbox: MiB of memory, disk and swap, and CPUs. 0 is no bound; a disk always has one.

    Example:
        >>> sandbox.info.resources.memory_mib
        512
    """

    memory_mib: int
    vcpus: int
    disk_mib: int
    swap_mib: int


@frozen
class OOMInfo:
    """That the host ended the sandbox for want of memory.

    Attributes:
        kills: How often, at least 1.
        killed_at: When it last did.
        restart_at: When the daemon starts the sandbox again, None when no start is due.

    Example:
        >>> if sandbox.inspect().oom:
        ...     print("out of memory")
    """

    kills: int
    killed_at: datetime
    restart_at: datetime | None


@frozen
class EffectiveRule:
    """A rule of the egress policy as the host enforces it.

    Attributes:
        id: Its position, from "1"; a decision names it.
        action: "allow" or "deny".
        rule: The rule as text.
        implied: "dns" or "dns-rule" when nobody wrote it, else None.

    Example:
        >>> [r.rule for r in sandbox.inspect().egress.rules]
        ['dns udp:53', 'dns tcp:53', 'api.example.com']
    """

    id: str
    action: str
    rule: str
    implied: str | None


@frozen
class Egress:
    """What the host enforces on a sandbox's traffic; `missing` says that the policy is lost and nothing is reachable.

    Example:
        >>> sandbox.inspect().egress.missing
        False
    """

    rules: list[EffectiveRule]
    missing: bool


@frozen
class SandboxInfo:
    """The record of a sandbox.

    Attributes:
        id, image, provider, resources, created_at: Always there.
        state: "pending", "created", "running", "paused", "unresponsive", "stopped" or "failed".
        name, digest, snapshot, forked_from, kernel, policy: None where they do not apply.
        stopped_reason, failed_reason: Why it is in that state, None in others.
        oom: Set when the host ended it for want of memory.
        processes, secrets, ports: What it holds, empty when nothing.
        started_at: The last start, None before the first.
        egress: The rules in force; only inspect() and get() read them, and only a sandbox with a policy has them.

    Example:
        >>> sandbox.inspect().state
        'running'
    """

    id: str
    image: str
    provider: str
    state: str
    resources: Resources
    created_at: datetime
    name: str | None
    digest: str | None
    snapshot: str | None
    forked_from: str | None
    kernel: str | None
    stopped_reason: str | None
    failed_reason: str | None
    oom: OOMInfo | None
    processes: list[ProcessInfo]
    secrets: list[str]
    policy: str | None
    ports: list[PortForward]
    started_at: datetime | None
    egress: Egress | None


@frozen
class Version:
    """The server's version and the version of its API.

    Example:
        >>> shard.version().api_version
        'v0'
    """

    version: str
    api_version: str


@frozen
class Capabilities:
    """Which verbs the server's default provider supports; `swap` says whether swap_mib above 0 is allowed.

    Example:
        >>> shard.capabilities().fork
        False
    """

    create: bool
    start: bool
    stop: bool
    remove: bool
    pause: bool
    resume: bool
    fork: bool
    snapshot: bool
    port: bool
    swap: bool


@frozen
class ProviderInfo:
    """One way to isolate sandboxes, and what it is worth on the server's host.

    Attributes:
        name: "gvisor", "runc" or another: what create() takes as `provider`.
        available: Whether it works on that host.
        reason: Why it is not available, None when it is.
        default: Whether create() takes it when no provider is named.
        version: Its version, None when it is not known.
        capabilities: Which verbs it supports.

    Example:
        >>> [p.name for p in shard.providers() if p.available]
        ['gvisor', 'runc']
    """

    name: str
    available: bool
    reason: str | None
    default: bool
    version: str | None
    capabilities: Capabilities


@frozen
class HostAddress:
    """An address of the host at which a forward is reached, and the interface that has it.

    Example:
        >>> sandbox.ports.add(9000, 8000).reachable_on
        [HostAddress(interface='lo', address='127.0.0.1')]
    """

    interface: str
    address: str


@frozen
class Port:
    """A forward as it stands.

    Attributes:
        sandbox: The sandbox's id.
        sandbox_name: Its name, None when it has none.
        host_port, guest_port, public: As in PortForward.
        address: Where the host listens: "127.0.0.1" or "0.0.0.0".
        listening: False while the sandbox does not run or the host refuses the port.
        error: Why the host refuses it, else None.
        reachable_on: The addresses a client connects to.

    Example:
        >>> forward = sandbox.ports.add(9000, 8000)
        >>> forward.listening
        True
    """

    sandbox: str
    sandbox_name: str | None
    host_port: int
    guest_port: int
    public: bool
    address: str
    listening: bool
    error: str | None
    reachable_on: list[HostAddress]


@frozen
class FileInfo:
    """What a path is; of a link, the link itself.

    Attributes:
        type: "file", "dir", "symlink" or "other".
        size: In bytes; devices and /proc files report 0 or less than they give.
        mode: Permission bits with setuid, setgid and sticky, up to 0o7777.
        uid, gid: The owner.
        mtime: The last change of its contents.

    Example:
        >>> oct(sandbox.files.stat("/etc/passwd").mode)
        '0o644'
    """

    type: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime: datetime


@frozen
class FileEntry:
    """One entry of a directory: a FileInfo with a name.

    A name that is not UTF-8 has surrogate escapes, as os.fsdecode makes them; as part of a path it is found again.

    Example:
        >>> [e.name for e in sandbox.files.list("/") if e.type == "dir"]
        ['bin', 'dev', 'etc']
    """

    name: str
    type: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime: datetime


@frozen
class FileEvent:
    """One change below a directory that is watched.

    Paths begin with the path that is watched; names that are not UTF-8 have surrogate escapes, as in FileEntry.

    Attributes:
        type: "created", "modified", "deleted", "moved", or "overflow": events are missing here, so list the tree again.
        path: What changed; of "overflow" the directory that is watched.
        moved_from: Where a moved entry was, else None. What a moved directory holds moves along without events.
        is_dir: Whether it is a directory.
        time: The sandbox's clock.

    Example:
        >>> for event in sandbox.files.watch("/srv"):
        ...     print(event.type, event.path)
        created /srv/app.py
    """

    type: str
    path: str
    moved_from: str | None
    is_dir: bool
    time: datetime


@frozen
class Snapshot:
    """The record of a snapshot: the files of a sandbox, which outlive it.

    Attributes:
        id, name: By either of which it is found; `name` is None when it has none.
        source, source_name: The sandbox that it was made from.
        image, digest, provider: The same as the source's.
        disk_mib, memory_mib: The source's bounds, in MiB.
        size: What it occupies on the host, in bytes.
        created_at: When it was made.

    Example:
        >>> shard.snapshots.create(sandbox, name="web-files").size
        1048576
    """

    id: str
    source: str
    image: str
    digest: str
    provider: str
    disk_mib: int
    memory_mib: int
    size: int
    created_at: datetime
    name: str | None
    source_name: str | None


@frozen
class SecretInfo:
    """A stored secret without its value, which is never read back.

    Example:
        >>> shard.secrets.set("API_TOKEN", value="...", destinations=["api.example.com"]).placeholder
        'mock-API_TOKEN'
    """

    name: str
    destinations: list[str]
    placeholder: str
    updated_at: datetime


@frozen
class SecretList:
    """The stored secrets, and a warning for each entry that the daemon could not read.

    Example:
        >>> [s.name for s in shard.secrets.list()]
        ['API_TOKEN']
    """

    secrets: list[SecretInfo]
    warnings: list[str]

    def __iter__(self) -> Iterator[SecretInfo]:
        return iter(self.secrets)

    def __len__(self) -> int:
        return len(self.secrets)


@frozen
class Policy:
    """A network policy.

    Attributes:
        name: Its name.
        rules: Its rules in order.
        holders: The sandboxes that hold it. Empty in policies.list().
        dns: "open" or "closed": whether it lets names be looked up. "" in policies.list().

    Example:
        >>> shard.policies.get("api-only").dns
        'open'
    """

    name: str
    rules: list[PolicyRule]
    holders: list[str]
    dns: str


@frozen
class EgressDecision:
    """One decision about a sandbox's traffic. Headers, bodies and secret values are never part of it.

    Attributes:
        time: When it was taken.
        source: "proxy", "dns" or "host".
        verdict: "allow" or "deny".
        rule: The id of the rule that decided, or a word such as "default" or "private".
        host, port, address, protocol, rule_text, reason: None where they do not apply. Packets alone have a protocol.

    Example:
        >>> [d.host for d in sandbox.egress_log() if d.verdict == "deny"]
        ['example.org']
    """

    time: datetime
    source: str
    verdict: str
    rule: str
    host: str | None
    port: int | None
    address: str | None
    protocol: str | None
    rule_text: str | None
    reason: str | None


def _rule_text(f: Fields) -> str:
    """A rule of the wire in the form in which it is written."""
    kind, value = f.object("destination", lambda d: (d.text("kind"), d.text("value")), "a destination")
    text = f"suffix:{value}" if kind == "domain-suffix" else value
    protocol, ports = f.maybe("protocol", str), f.maybe("ports", list) or []
    if protocol:
        text += f" {protocol}" + (":" + ",".join(str(p) for p in ports) if ports else "")
    return text


def policy_rule(f: Fields) -> PolicyRule:
    return PolicyRule(action=f.text("action"), rule=_rule_text(f))


def policy(f: Fields) -> Policy:
    return Policy(
        name=f.text("name"),
        rules=f.objects("rules", policy_rule, "a rule"),
        holders=f.texts("holders"),
        dns=f.maybe("dns", str) or "",
    )


def exit_status(f: Fields) -> ExitStatus:
    return ExitStatus(code=f.number("code"), signal=f.number("signal"))


def command_info(f: Fields) -> CommandInfo:
    ended = f.maybe_object("exit_status", exit_status, "an exit status")
    return CommandInfo(
        id=f.text("exec"),
        sandbox=f.text("sandbox"),
        command=f.texts("command"),
        state=f.text("state"),
        exit_code=ended.code if ended else None,
        signal=(ended.signal or None) if ended else None,
        started_at=f.time("started_at"),
        exited_at=f.maybe_time("exited_at"),
        lost_bytes=f.maybe("lost_bytes", int) or 0,
    )


def _restart(f: Fields) -> Restart:
    return Restart(policy=f.text("policy"), retries=f.maybe("retries", int) or 0, backoff=f.real("backoff"))


def _process_status(f: Fields) -> ProcessStatus:
    return ProcessStatus(
        state=f.text("state"),
        restarts=f.maybe("restarts", int) or 0,
        exit=f.maybe_object("exit", exit_status, "an exit status"),
        started_at=f.maybe_time("started_at"),
    )


def process_info(f: Fields) -> ProcessInfo:
    return ProcessInfo(
        name=f.text("name"),
        command=f.texts("command"),
        restart=f.object("restart", _restart, "a restart policy"),
        killed=f.flag("killed"),
        status=f.object("status", _process_status, "a process's status"),
        env=f.texts("env"),
        workdir=f.maybe("workdir", str),
        user=f.maybe("user", str),
    )


def _resources(f: Fields) -> Resources:
    return Resources(f.number("memory_mib"), f.number("vcpus"), f.number("disk_mib"), f.number("swap_mib"))


def _oom(f: Fields) -> OOMInfo:
    return OOMInfo(kills=f.number("kills"), killed_at=f.time("killed_at"), restart_at=f.maybe_time("restart_at"))


def _port_forward(f: Fields) -> PortForward:
    return PortForward(f.number("host_port"), f.number("guest_port"), f.flag("public"))


def _effective_rule(f: Fields) -> EffectiveRule:
    return EffectiveRule(id=f.text("id"), action=f.text("action"), rule=_rule_text(f), implied=f.maybe("implied", str))


def _egress(f: Fields) -> Egress:
    return Egress(rules=f.objects("rules", _effective_rule, "a rule"), missing=f.flag("missing"))


def sandbox_info(f: Fields) -> SandboxInfo:
    return SandboxInfo(
        id=f.text("id"),
        image=f.text("image"),
        provider=f.text("provider"),
        state=f.text("state"),
        resources=f.object("resources", _resources, "a sandbox's resources"),
        created_at=f.time("created_at"),
        name=f.maybe("name", str),
        digest=f.maybe("digest", str),
        snapshot=f.maybe("snapshot", str),
        forked_from=f.maybe("forked_from", str),
        kernel=f.maybe("kernel", str),
        stopped_reason=f.maybe("stopped_reason", str),
        failed_reason=f.maybe("failed_reason", str),
        oom=f.maybe_object("oom", _oom, "a sandbox's oom"),
        processes=f.objects("processes", process_info, "a process"),
        secrets=f.texts("secrets"),
        policy=f.maybe("policy", str),
        ports=f.objects("ports", _port_forward, "a port"),
        started_at=f.maybe_time("started_at"),
        egress=f.maybe_object("egress", _egress, "a sandbox's egress"),
    )


def version(f: Fields) -> Version:
    return Version(version=f.text("version"), api_version=f.text("api_version"))


def capabilities(f: Fields) -> Capabilities:
    names = ("create", "start", "stop", "remove", "pause", "resume", "fork", "snapshot", "port", "swap")
    return Capabilities(**{name: f.flag(name) for name in names})


def provider_info(f: Fields) -> ProviderInfo:
    return ProviderInfo(
        name=f.text("name"),
        available=f.flag("available"),
        reason=f.maybe("reason", str),
        default=f.flag("default"),
        version=f.maybe("version", str),
        capabilities=f.object("capabilities", capabilities, "capabilities"),
    )


def port(f: Fields) -> Port:
    return Port(
        sandbox=f.text("sandbox"),
        sandbox_name=f.maybe("sandbox_name", str),
        host_port=f.number("host_port"),
        guest_port=f.number("guest_port"),
        public=f.flag("public"),
        address=f.text("address"),
        listening=f.flag("listening"),
        error=f.maybe("error", str),
        reachable_on=f.objects("reachable_on", lambda a: HostAddress(a.text("interface"), a.text("address")), "an address"),
    )


def file_info(f: Fields) -> FileInfo:
    return FileInfo(f.text("type"), f.number("size"), f.number("mode"), f.number("uid"), f.number("gid"), f.time("mtime"))


def _exact(f: Fields, key: str) -> str | None:
    """A name or path, from its real bytes when it is not UTF-8."""
    exact = f.maybe(f"{key}_bytes", str)
    return f.maybe(key, str) if exact is None else base64.b64decode(exact).decode("utf-8", "surrogateescape")


def file_event(f: Fields) -> FileEvent:
    path = _exact(f, "path")
    return FileEvent(
        f.text("type"), f.text("path") if path is None else path, _exact(f, "from"), f.flag("is_dir"), f.time("time")
    )


def file_entry(f: Fields) -> FileEntry:
    name = _exact(f, "name")
    i = file_info(f)
    return FileEntry(f.text("name") if name is None else name, i.type, i.size, i.mode, i.uid, i.gid, i.mtime)


def snapshot(f: Fields) -> Snapshot:
    return Snapshot(
        id=f.text("id"),
        source=f.text("source"),
        image=f.text("image"),
        digest=f.text("digest"),
        provider=f.text("provider"),
        disk_mib=f.number("disk_mib"),
        memory_mib=f.number("memory_mib"),
        size=f.number("size"),
        created_at=f.time("created_at"),
        name=f.maybe("name", str),
        source_name=f.maybe("source_name", str),
    )


def secret_info(f: Fields) -> SecretInfo:
    return SecretInfo(f.text("name"), f.texts("destinations"), f.text("placeholder"), f.time("updated_at"))


def egress_decision(f: Fields) -> EgressDecision:
    return EgressDecision(
        time=f.time("time"),
        source=f.text("source"),
        verdict=f.text("verdict"),
        rule=f.text("rule"),
        host=f.maybe("host", str),
        port=f.maybe("port", int),
        address=f.maybe("address", str),
        protocol=f.maybe("protocol", str),
        rule_text=f.maybe("rule_text", str),
        reason=f.maybe("reason", str),
    )


for _name in __all__:
    globals()[_name].__module__ = "useshards"
