"""The client itself: sandboxes, and what lives beside them."""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import frozen

from .._models import (
    Capabilities,
    Policy,
    PolicyRule,
    Port,
    PortForward,
    ProviderInfo,
    SandboxInfo,
    SecretInfo,
    SecretList,
    Snapshot,
    Version,
    capabilities,
    policy,
    port,
    provider_info,
    sandbox_info,
    secret_info,
    snapshot,
    version,
)
from .._settings import resolve
from ._sandbox import AsyncSandbox, environ, present
from ._transport import AsyncTransport, read, segment


@frozen
class AsyncSandboxList:
    """Sandboxes, and a warning for each entry that the daemon could not read: without any, the list is complete.

    Example:
        >>> found = await shard.list(all=True)
        >>> for sandbox in found:
        ...     print(sandbox.id)
    """

    sandboxes: list[AsyncSandbox]
    warnings: list[str]

    def __iter__(self) -> Iterator[AsyncSandbox]:
        return iter(self.sandboxes)

    def __len__(self) -> int:
        return len(self.sandboxes)


def _ref(sandbox: AsyncSandbox | str) -> str:
    return segment(sandbox.id if isinstance(sandbox, AsyncSandbox) else sandbox, "sandbox")


class AsyncPolicies:
    """The stored network policies, and which sandbox holds which.

    Example:
        >>> await shard.policies.set("offline", [PolicyRule("deny", "any")])
    """

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def set(self, name: str, rules: Iterable[PolicyRule]) -> Policy:
        """Makes a policy, or replaces all its rules; sandboxes that hold it enforce the new ones.

        Args:
            name: Up to 64 of a-z, 0-9 and "-", beginning with a letter or digit.
            rules: Up to 256; the first that matches decides, and what none matches is denied.

        Raises:
            InvalidRequestError: A rule or the name is not valid; the message says which.

        Example:
            >>> await shard.policies.set("api-only", [PolicyRule("allow", "api.example.com")])
        """
        body = {"rules": [{"action": rule.action, "rule": rule.rule} for rule in rules]}
        return read(await self._transport.call("PUT", f"/v0/policies/{segment(name, 'policy')}", body=body), policy, "a policy")

    async def get(self, name: str) -> Policy:
        """Reads a policy, who holds it, and whether it lets names be looked up.

        Raises:
            NotFoundError: There is no such policy.

        Example:
            >>> (await shard.policies.get("api-only")).holders
            ['demo']
        """
        return read(await self._transport.call("GET", f"/v0/policies/{segment(name, 'policy')}"), policy, "a policy")

    async def list(self) -> list[Policy]:
        """All policies, without holders and dns.

        Raises:
            PermissionDeniedError: The key lacks the scope policy:*.

        Example:
            >>> [p.name for p in await shard.policies.list()]
            ['api-only', 'offline']
        """
        found, _ = await self._transport.pages("/v0/policies", "policies")
        return [read(item, policy, "a policy") for item in found]

    async def remove(self, name: str) -> None:
        """Deletes a policy that no sandbox holds.

        Raises:
            ConflictError: It is held (code "in_use"); `holders` says by whom.
            NotFoundError: There is no such policy.

        Example:
            >>> await shard.policies.remove("offline")
        """
        await self._transport.call("DELETE", f"/v0/policies/{segment(name, 'policy')}")

    async def attach(self, sandbox: AsyncSandbox | str, name: str) -> SandboxInfo:
        """Gives a stopped sandbox a policy in place of the one it has.

        Args:
            sandbox: A handle, an id or a name.
            name: The policy's.

        Raises:
            ConflictError: The sandbox is not stopped (code "sandbox_live").
            InvalidRequestError: There is no such policy.

        Example:
            >>> (await shard.policies.attach(sandbox, "offline")).policy
            'offline'
        """
        answer = await self._transport.call("PUT", f"/v0/sandboxes/{_ref(sandbox)}/policy", body={"policy": name})
        return _told(sandbox, answer)

    async def detach(self, sandbox: AsyncSandbox | str) -> SandboxInfo:
        """Takes a stopped sandbox's policy away.

        Args:
            sandbox: A handle, an id or a name.

        Raises:
            ConflictError: The sandbox is not stopped (code "sandbox_live").

        Example:
            >>> await shard.policies.detach("demo")
        """
        return _told(sandbox, await self._transport.call("DELETE", f"/v0/sandboxes/{_ref(sandbox)}/policy"))


def _told(sandbox: AsyncSandbox | str, answer: object) -> SandboxInfo:
    """Reads a sandbox's record, and lets the handle that was used have it."""
    info = read(answer, sandbox_info, "a sandbox")
    if isinstance(sandbox, AsyncSandbox):
        sandbox.info = info
    return info


class AsyncSecrets:
    """The stored secrets, whose values are never read back, and which sandbox may use which.

    Example:
        >>> await shard.secrets.set("API_TOKEN", value=token, destinations=["api.example.com"])
    """

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def set(
        self, name: str, *, value: str, destinations: Iterable[str] | None = None, placeholder: str | None = None
    ) -> SecretInfo:
        """Stores a secret, or replaces its value at once for every sandbox that holds it.

        Args:
            name: Up to 128 of A-Z, 0-9 and "_", not beginning with a digit.
            value: At least one character.
            destinations: Hosts, or "*.domain", whose HTTPS requests get the value. Needed the first time; kept when None.
            placeholder: What sandboxes see instead; "mock-<name>" by default.

        Raises:
            InvalidRequestError: The name, a destination or the placeholder is not valid.
            ConflictError: The placeholder cannot change while the secret is held (code "in_use").

        Example:
            >>> await shard.secrets.set("API_TOKEN", value=token, destinations=["api.example.com"])
        """
        hosts = None if destinations is None else _strings(destinations, "destinations")
        body = {"value": value, **present(placeholder=placeholder)}
        if hosts is not None:
            body["destinations"] = hosts
        return read(
            await self._transport.call("PUT", f"/v0/secrets/{segment(name, 'secret')}", body=body), secret_info, "a secret"
        )

    async def list(self) -> SecretList:
        """All secrets without their values, and a warning for each that the daemon could not read.

        Raises:
            PermissionDeniedError: The key lacks the scope secret:*.

        Example:
            >>> (await shard.secrets.list()).warnings
            []
        """
        found, warnings = await self._transport.pages("/v0/secrets", "secrets")
        return SecretList([read(item, secret_info, "a secret") for item in found], warnings)

    async def remove(self, name: str, *, force: bool = False) -> None:
        """Deletes a secret.

        Args:
            name: The secret's.
            force: Also when a sandbox holds it; its placeholder then no longer gets a value. Default False.

        Raises:
            ConflictError: It is held (code "in_use"); `holders` says by whom.
            NotFoundError: There is no such secret.

        Example:
            >>> await shard.secrets.remove("API_TOKEN")
        """
        query = {"force": "true"} if force else None
        await self._transport.call("DELETE", f"/v0/secrets/{segment(name, 'secret')}", query=query)

    async def grant(self, sandbox: AsyncSandbox | str, name: str) -> SandboxInfo:
        """Lets a stopped sandbox use a secret.

        Args:
            sandbox: A handle, an id or a name.
            name: The secret's.

        Raises:
            ConflictError: The sandbox is not stopped (code "sandbox_live").

        Example:
            >>> (await shard.secrets.grant(sandbox, "API_TOKEN")).secrets
            ['API_TOKEN']
        """
        path = f"/v0/sandboxes/{_ref(sandbox)}/secrets/{segment(name, 'secret')}"
        return _told(sandbox, await self._transport.call("POST", path))

    async def ungrant(self, sandbox: AsyncSandbox | str, name: str) -> SandboxInfo:
        """Takes a secret away from a stopped sandbox.

        Args:
            sandbox: A handle, an id or a name.
            name: The secret's.

        Raises:
            ConflictError: The sandbox is not stopped (code "sandbox_live").

        Example:
            >>> await shard.secrets.ungrant("demo", "API_TOKEN")
        """
        path = f"/v0/sandboxes/{_ref(sandbox)}/secrets/{segment(name, 'secret')}"
        return _told(sandbox, await self._transport.call("DELETE", path))


class AsyncSnapshots:
    """Snapshots: the files of sandboxes, which outlive them.

    Example:
        >>> snapshot = await shard.snapshots.create(sandbox, name="web-files")
        >>> copy = await shard.create(snapshot="web-files")
    """

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(self, sandbox: AsyncSandbox | str, *, name: str | None = None) -> Snapshot:
        """Copies the files of a stopped sandbox into a snapshot.

        Args:
            sandbox: A handle, an id or a name.
            name: The snapshot's name, none by default.

        Raises:
            ConflictError: The sandbox is not stopped, or the name is taken.
            UnsupportedError: The provider makes no snapshots.

        Example:
            >>> (await shard.snapshots.create("demo", name="demo-files")).source_name
            'demo'
        """
        ref = sandbox.id if isinstance(sandbox, AsyncSandbox) else sandbox
        body = {"sandbox": ref, **present(name=name)}
        return read(await self._transport.call("POST", "/v0/snapshots", body=body, waits=True), snapshot, "a snapshot")

    async def list(self) -> list[Snapshot]:
        """All snapshots.

        Raises:
            PermissionDeniedError: The key lacks the scope sandbox:read.

        Example:
            >>> [s.name for s in await shard.snapshots.list()]
            ['demo-files']
        """
        found, _ = await self._transport.pages("/v0/snapshots", "snapshots")
        return [read(item, snapshot, "a snapshot") for item in found]

    async def inspect(self, ref: str) -> Snapshot:
        """Reads a snapshot, by id or name.

        Raises:
            NotFoundError: There is no such snapshot.

        Example:
            >>> (await shard.snapshots.inspect("demo-files")).size
            1048576
        """
        return read(await self._transport.call("GET", f"/v0/snapshots/{segment(ref, 'snapshot')}"), snapshot, "a snapshot")

    async def remove(self, ref: str) -> None:
        """Deletes a snapshot, by id or name. Sandboxes made from it stay.

        Raises:
            NotFoundError: There is no such snapshot.

        Example:
            >>> await shard.snapshots.remove("demo-files")
        """
        await self._transport.call("DELETE", f"/v0/snapshots/{segment(ref, 'snapshot')}")


class AsyncShard:
    """A client of `shard serve`.

    Args:
        remote: The server's URL, such as "https://shard.example.com"; SHARD_REMOTE when None or empty.
        api_key: The API key; SHARD_API_KEY when None. An empty one is refused.
        ca_file: A PEM file of the CA that signed the server's certificate, for https only; SHARD_CA_FILE when None or
            empty. Without either, the public CAs count.
        timeout: The bound of each plain request in seconds, 60 by default; None for none. Calls that wait on the
            sandbox (create, run, start, stop, pause, resume, fork, remove, snapshots.create, waits and kills of
            processes, files.remove, files.upload_dir) and open streams have no bound on the answer. A stream whose
            server gives no sign of life for 20 s ends with ShardConnectionError.

    Raises:
        ConfigurationError: A setting is missing or refused.
        ValueError: The timeout is not above 0.

    An http remote works and emits a UserWarning: everything, the key too, is sent unencrypted. Proxy variables of the
    environment are not read.

    Example:
        >>> async with AsyncShard() as shard:
        ...     sandbox = await shard.create("alpine:3.20", memory_mib=512)
        ...     try:
        ...         print((await sandbox.exec(["echo", "hello"])).stdout)
        ...     finally:
        ...         await sandbox.remove(force=True)
    """

    def __init__(
        self,
        remote: str | None = None,
        api_key: str | None = None,
        *,
        ca_file: str | os.PathLike[str] | None = None,
        timeout: float | None = 60,
    ) -> None:
        self._transport = AsyncTransport(resolve(remote, api_key, ca_file, timeout, stacklevel=2))
        self.policies = AsyncPolicies(self._transport)
        self.secrets = AsyncSecrets(self._transport)
        self.snapshots = AsyncSnapshots(self._transport)

    def __repr__(self) -> str:
        return f"<AsyncShard {self._transport.remote}>"

    async def __aenter__(self) -> AsyncShard:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Lets go of every connection and stream. Commands and sandboxes go on.

        Example:
            >>> await shard.aclose()
        """
        await self._transport.aclose()

    async def create(
        self,
        image: str | None = None,
        *,
        snapshot: str | None = None,
        name: str | None = None,
        provider: str | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
        secrets: Iterable[str] | None = None,
        policy: str | None = None,
        memory_mib: int | None = None,
        vcpus: int | None = None,
        disk_mib: int | None = None,
        swap_mib: int | None = None,
        ports: Sequence[PortForward] | None = None,
    ) -> AsyncSandbox:
        """Makes a sandbox and waits until it runs, which can take minutes while the server pulls the image.

        Args:
            image: The image, such as "alpine:3.20". Either this or `snapshot`; the other stays None.
            snapshot: The id or name of a snapshot, from whose files the sandbox starts. Default None.
            name: A name, 1 to 64 of a-z, 0-9, "-" and "_"; by default it has its id only.
            provider: How it is isolated, such as "gvisor" or "runc": the name of one of providers(); a snapshot's own or
                the daemon's default when None.
            env: The environment that every command starts with, added to the image's; none by default.
            workdir: The working directory of every command; the image's by default.
            user: A user name or uid in the sandbox; the image's by default.
            secrets: The names of the secrets to grant; none by default.
            policy: The name of the network policy; by default the sandbox reaches the internet, no private network.
            memory_mib: The memory bound in MiB; by default a snapshot's own, else 512 on Firecracker and vz and none
                elsewhere.
            vcpus: The number of CPUs; the daemon's default when None.
            disk_mib: The disk's size in MiB; the daemon's default or a snapshot's own when None.
            swap_mib: The swap file in MiB, a part of the disk; 2048 on Firecracker and vz by default, none elsewhere.
            ports: Host ports to forward from the first start; none by default.

        Returns:
            A sandbox in the state "running", or "failed" with the reason in `info.failed_reason`.

        Raises:
            ValueError: Neither or both of `image` and `snapshot` are given.
            InvalidRequestError: An argument is refused.
            ConflictError: The name or a host port is taken.

        Example:
            >>> sandbox = await shard.create("python:3.12-slim", memory_mib=1024, vcpus=2, disk_mib=4096)
        """
        if not image and not snapshot:
            raise ValueError("give an image or a snapshot")
        if image and snapshot:
            raise ValueError("give an image or a snapshot, not both")
        body = present(
            image=image or None,
            snapshot=snapshot or None,
            name=name,
            provider=provider,
            env=environ(env),
            workdir=workdir,
            user=user,
            secrets=_strings(secrets or (), "secrets"),
            policy=policy,
            ports=[{"host_port": p.host_port, "guest_port": p.guest_port, "public": p.public} for p in ports or ()],
        )
        body["resources"] = present(memory_mib=memory_mib, vcpus=vcpus or 0, disk_mib=disk_mib or 0, swap_mib=swap_mib)
        answer = await self._transport.call("POST", "/v0/sandboxes", query={"wait": "true"}, body=body, waits=True)
        return AsyncSandbox(self._transport, read(answer, sandbox_info, "a sandbox"))

    async def get(self, ref: str) -> AsyncSandbox:
        """Finds a sandbox by id, name or the first characters of its id, at least four.

        Raises:
            NotFoundError: There is no such sandbox.
            InvalidRequestError: It is no reference, or several ids begin like that.

        Example:
            >>> sandbox = await shard.get("demo")
        """
        answer = await self._transport.call("GET", f"/v0/sandboxes/{segment(ref, 'sandbox')}")
        return AsyncSandbox(self._transport, read(answer, sandbox_info, "a sandbox"))

    async def list(self, *, all: bool = False) -> AsyncSandboxList:
        """The active sandboxes, and warnings about entries that the daemon could not read.

        Args:
            all: Also the stopped ones. Default False.

        Raises:
            PermissionDeniedError: The key lacks the scope sandbox:read.

        Example:
            >>> for sandbox in (await shard.list(all=True)).sandboxes:
            ...     print(sandbox.id, sandbox.info.state)
        """
        found, warnings = await self._transport.pages("/v0/sandboxes", "sandboxes", {"all": "true"} if all else None)
        sandboxes = [AsyncSandbox(self._transport, read(item, sandbox_info, "a sandbox")) for item in found]
        return AsyncSandboxList(sandboxes, warnings)

    async def version(self) -> Version:
        """The server's version and that of its API.

        Raises:
            AuthenticationError: The key is not valid: the quickest way to find out.

        Example:
            >>> (await shard.version()).api_version
            'v0'
        """
        return read(await self._transport.call("GET", "/v0/version"), version, "a version")

    async def capabilities(self) -> Capabilities:
        """Which verbs the server's default provider supports.

        Raises:
            AuthenticationError: The key is not valid.

        Example:
            >>> if (await shard.capabilities()).fork:
            ...     copy = await sandbox.fork()
        """
        return read(await self._transport.call("GET", "/v0/capabilities"), capabilities, "capabilities")

    async def providers(self) -> builtins.list[ProviderInfo]:
        """Every provider that the server knows, also those that do not work on its host, with the reason.

        Raises:
            AuthenticationError: The key is not valid.

        Example:
            >>> [p.name for p in await shard.providers() if p.available]
            ['gvisor', 'runc']
        """
        answer = await self._transport.call("GET", "/v0/providers")
        return read(answer, lambda f: f.objects("providers", provider_info, "a provider"), "a list")

    async def ports(self) -> builtins.list[Port]:
        """The forwards of every sandbox in the order of their host ports.

        Raises:
            PermissionDeniedError: The key lacks the scope port:read.

        Example:
            >>> [(p.host_port, p.sandbox_name) for p in await shard.ports()]
            [(9000, 'demo')]
        """
        found, _ = await self._transport.pages("/v0/ports", "ports")
        return [read(item, port, "a port") for item in found]


def _strings(names: Iterable[str], what: str) -> list[str]:
    """A list of names; a lone string would be taken apart into its letters."""
    if isinstance(names, str):
        raise TypeError(f"{what} must be a list of strings, not a string")
    return [*names]
