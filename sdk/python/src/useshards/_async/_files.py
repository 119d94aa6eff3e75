"""The files of a running sandbox."""

from __future__ import annotations

import builtins
import io
import json
import os
import stat as _stat
import tempfile
from collections.abc import AsyncIterator
from typing import IO, Any

from .._archive import pack, unpack
from .._errors import ProtocolError, UnknownLengthError
from .._models import FileEntry, FileInfo, file_entry, file_info
from .._runtime import async_blocking
from ._process import AsyncFileWatch
from ._transport import AsyncTransport, read, segment

# How much of a file is in memory at once, in bytes.
_CHUNK = 1 << 20

_STAT = "x-shard-stat"


def _octal(mode: int | None) -> str | None:
    if mode is None:
        return None
    if isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 0o777:
        raise ValueError("mode must be permission bits from 0 to 0o777")
    return f"{mode:04o}"


def _checked(path: str) -> str:
    if not isinstance(path, str):
        raise TypeError("a path in the sandbox must be a string")
    return path


def _measure(source: IO[bytes]) -> int:
    """What is left of a stream, in bytes."""
    try:
        here = source.tell()
        size = source.seek(0, io.SEEK_END) - here
        source.seek(here)
    except (OSError, AttributeError, ValueError):
        raise UnknownLengthError("the stream cannot be measured: pass size=") from None
    return max(size, 0)


def _at_end(source: IO[bytes]) -> bool:
    return not source.read(1)


async def _exactly(source: IO[bytes], size: int, *, whole: bool) -> AsyncIterator[bytes]:
    """`size` bytes of a stream. With `whole` there must be no more; this is known before the last byte is sent."""
    left = size
    while left:
        chunk = await async_blocking(source.read, min(left, _CHUNK))
        if not isinstance(chunk, (bytes, bytearray, memoryview)):
            raise TypeError("the stream must give bytes: open the file in binary mode")
        if not chunk:
            raise UnknownLengthError(f"the source ended {left} bytes before its size of {size}")
        left -= len(chunk)
        if left < 0:
            raise UnknownLengthError(f"the source gave more than was asked for, beyond its size of {size}")
        if not left and whole and not await async_blocking(_at_end, source):
            raise UnknownLengthError(f"the source grew beyond its size of {size} bytes while it was read")
        yield bytes(chunk)


class AsyncFiles:
    """The files of a running sandbox. Paths are absolute; "~" and variables mean nothing.

    Example:
        >>> await sandbox.files.write("/root/notes.txt", "hello\\n")
        >>> print(await sandbox.files.read_text("/root/notes.txt"), end="")
        hello
    """

    def __init__(self, transport: AsyncTransport, sandbox_id: str) -> None:
        self._transport = transport
        self._base = f"/v0/sandboxes/{segment(sandbox_id, 'sandbox')}"

    async def write(
        self,
        path: str,
        data: str | bytes | IO[bytes],
        *,
        size: int | None = None,
        mode: int | None = None,
        parents: bool = False,
        user: str | None = None,
    ) -> None:
        """Writes a file, which appears complete or not at all.

        Args:
            path: Where, in the sandbox.
            data: Text (as UTF-8), bytes, or a stream of bytes from where it stands.
            size: The length in bytes of a stream that cannot seek; exactly as much of it is read. None, the default, measures.
            mode: Permission bits up to 0o777; 0o644 by default.
            parents: Make missing parent directories. Default False.
            user: Who writes and owns it, a name or uid; the sandbox's user by default.

        Raises:
            UnknownLengthError: The stream cannot be measured, or was shorter or longer than its size.
            NotFoundError: A parent directory is missing and `parents` is not given.
            InvalidRequestError: The path is not valid or is a directory.
            ConflictError: The sandbox does not run.

        Example:
            >>> await sandbox.files.write("/srv/app/config.json", '{"debug": true}', mode=0o640, parents=True)
        """
        query = self._query(path, mode, parents, user)
        if isinstance(data, str):
            data = data.encode()
        if isinstance(data, (bytes, bytearray, memoryview)):
            if size is not None and size != len(data):
                raise ValueError("size differs from the length of the data: leave it out")
            await self._put("files", query, io.BytesIO(data), len(data), whole=False)
        elif not hasattr(data, "read") or isinstance(data, io.TextIOBase):
            raise TypeError("data must be text, bytes, or a stream that is open in binary mode")
        elif size is None:
            await self._put("files", query, data, await async_blocking(_measure, data), whole=True)
        elif isinstance(size, bool) or size < 0:
            raise ValueError("size must not be negative")
        else:
            await self._put("files", query, data, size, whole=False)

    async def read(self, path: str) -> bytes:
        """The contents of a file, all of it in memory.

        Raises:
            NotFoundError: There is no such file.
            InvalidRequestError: It is not a regular file.
            ShardConnectionError: The file was cut on the way.

        Example:
            >>> await sandbox.files.read("/etc/hostname")
            b'demo\\n'
        """
        data = bytearray()
        query = {"path": _checked(path)}
        async with self._transport.open("GET", f"{self._base}/files", query=query, streams=True) as response:
            async for chunk in response.aiter_raw():
                data += chunk
        return bytes(data)

    async def read_text(self, path: str, encoding: str = "utf-8") -> str:
        """The contents of a file as text.

        Args:
            path: Which file.
            encoding: How its bytes are read; UTF-8 by default.

        Raises:
            UnicodeDecodeError: The file is not text in this encoding.
            NotFoundError: There is no such file.

        Example:
            >>> await sandbox.files.read_text("/etc/hostname")
            'demo\\n'
        """
        return (await self.read(path)).decode(encoding)

    async def stat(self, path: str) -> FileInfo:
        """What a path is; of a link, the link itself.

        Raises:
            NotFoundError: There is nothing at the path. Errors of this call carry no code, only a status.

        Example:
            >>> (await sandbox.files.stat("/etc")).type
            'dir'
        """
        return _stat_of(await self._transport.head(f"{self._base}/files", {"path": _checked(path)}))

    async def list(self, path: str) -> list[FileEntry]:
        """The entries of a directory, sorted by name; a link at the end of the path is followed.

        Raises:
            NotFoundError: There is no such directory.
            InvalidRequestError: It is not a directory.

        Example:
            >>> [entry.name for entry in await sandbox.files.list("/")]
            ['bin', 'dev', 'etc']
        """
        answer = await self._transport.call("GET", f"{self._base}/ls", query={"path": _checked(path)})
        return read(answer, lambda f: f.objects("entries", file_entry, "an entry"), "a listing")

    async def mkdir(self, path: str, *, mode: int | None = None, parents: bool = False, user: str | None = None) -> None:
        """Makes a directory.

        Args:
            path: Where, in the sandbox.
            mode: Permission bits up to 0o777; 0o755 by default.
            parents: Make missing parents too, and take a directory that is there. Default False.
            user: Who makes and owns it, a name or uid; the sandbox's user by default.

        Raises:
            InvalidRequestError: Something is there already.
            NotFoundError: A parent is missing and `parents` is not given.

        Example:
            >>> await sandbox.files.mkdir("/srv/app/logs", parents=True)
        """
        body: dict[str, Any] = {"path": _checked(path), "parents": parents}
        if mode is not None:
            body["mode"] = _octal(mode)
        if user is not None:
            body["user"] = user
        await self._transport.call("POST", f"{self._base}/mkdir", body=body)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Removes a path; of a link, the link itself.

        Args:
            path: What, in the sandbox.
            recursive: Also a directory with contents. Default False.

        Raises:
            NotFoundError: There is nothing at the path.
            InvalidRequestError: It is a directory with contents and `recursive` is not given.

        Example:
            >>> await sandbox.files.remove("/srv/app", recursive=True)
        """
        query = {"path": _checked(path), **({"recursive": "true"} if recursive else {})}
        await self._transport.call("DELETE", f"{self._base}/files", query=query, waits=True)

    def watch(self, path: str, *, recursive: bool = True) -> AsyncFileWatch:
        """What changes below a directory, as it happens, until the directory or the sandbox ends.

        An event "overflow" says that some are missing: list the tree again. A client that takes nothing for 30 s is cut.

        Args:
            path: The directory. Links below it are not followed, other file systems not entered.
            recursive: Also everything below its directories, at most 8192 of them. Default True.

        Raises:
            InvalidRequestError: It is no directory, or holds too many.
            NotFoundError: There is no such directory.
            ConflictError: The sandbox does not run.
            APIError: More is watched already than a sandbox may (status 429).
            ShardConnectionError: The stream broke: what has changed since is not known.

        Example:
            >>> async for event in sandbox.files.watch("/srv"):
            ...     print(event.type, event.path)
            created /srv/app.py
        """
        query = {"path": _checked(path), **({"recursive": "true"} if recursive else {})}
        return AsyncFileWatch(self._transport, f"{self._base}/watch", query)

    async def upload(
        self,
        local: str | os.PathLike[str],
        remote: str,
        *,
        mode: int | None = None,
        parents: bool = False,
        user: str | None = None,
    ) -> None:
        """Copies a file of this machine into the sandbox without holding it in memory.

        Args:
            local: The file here.
            remote: The file there, not a directory to put it into.
            mode: Permission bits up to 0o777; the local file's by default.
            parents: Make missing parent directories. Default False.
            user: Who owns it, a name or uid; the sandbox's user by default.

        Raises:
            FileNotFoundError: There is no such local file.
            UnknownLengthError: The local file grew or shrank on the way.
            NotFoundError: A parent directory is missing and `parents` is not given.

        Example:
            >>> await sandbox.files.upload("model.bin", "/srv/model.bin", parents=True)
        """
        _octal(mode)
        source, info = await async_blocking(_open_regular, local)
        with source:
            bits = _stat.S_IMODE(info.st_mode) & 0o777 if mode is None else mode
            await self._put("files", self._query(remote, bits, parents, user), source, info.st_size, whole=True)

    async def download(self, remote: str, local: str | os.PathLike[str]) -> None:
        """Copies a file of the sandbox to this machine without holding it in memory.

        The local file appears complete, by rename, or not at all; it has the permission bits of the other.

        Args:
            remote: The file there.
            local: The file here, not a directory to put it into.

        Raises:
            NotFoundError: There is no such file in the sandbox.
            FileNotFoundError: The local directory does not exist.
            ShardConnectionError: The file was cut on the way.

        Example:
            >>> await sandbox.files.download("/srv/report.pdf", "report.pdf")
        """
        target = os.path.abspath(os.fspath(local))
        if os.path.isdir(target):
            raise IsADirectoryError(f"{target} is a directory: name the file")
        landing = await async_blocking(_Landing, target)
        try:
            query = {"path": _checked(remote)}
            async with self._transport.open("GET", f"{self._base}/files", query=query, streams=True) as response:
                info = _stat_of(response.headers)
                async for chunk in response.aiter_raw():
                    if landing.take(chunk):
                        await async_blocking(landing.flush)
            await async_blocking(landing.land, info.mode & 0o777)
        finally:
            await async_blocking(landing.drop)

    async def upload_dir(self, local: str | os.PathLike[str], remote: str, *, user: str | None = None) -> None:
        """Copies the contents of a directory of this machine into a directory of the sandbox.

        Names, contents, permission bits, times, symbolic and hard links are kept. Owners, setuid and setgid bits and
        extended attributes are not; sockets, fifos and devices are left out. The tar is spooled to a temporary file.

        Args:
            local: The directory here.
            remote: Exactly the directory that gets the contents, whose parent must exist. It is made when missing; its
                other contents stay.
            user: Who owns what is written, a name or uid; the sandbox's user by default.

        Raises:
            FileNotFoundError: There is no such local directory.
            NotADirectoryError: It is something else.
            UnknownLengthError: A local file grew or shrank on the way.
            InvalidRequestError: The target cannot take it.

        Example:
            >>> await sandbox.files.upload_dir("site", "/srv/site")
        """
        with tempfile.TemporaryFile() as spool:
            size = await async_blocking(pack, os.fspath(local), spool)
            query = {"path": _checked(remote), **({"user": user} if user is not None else {})}
            await self._put("archive", query, spool, size, whole=False, media="application/x-tar", waits=True)

    async def download_dir(self, remote: str, local: str | os.PathLike[str]) -> None:
        """Copies the contents of a directory of the sandbox into a directory of this machine.

        What comes out of a sandbox is treated as hostile: it is spooled whole, nothing of it lands or leads outside
        of `local`, and nothing but files, directories and links is taken. Owners, setuid and setgid bits and extended
        attributes are not kept. At most 64 GiB and 1,048,576 entries.

        Args:
            remote: The directory there.
            local: Exactly the directory that gets the contents; it is made when missing, its other contents stay.

        Raises:
            UnsafeArchiveError: An entry was refused. What came before it has landed; no link leads out.
            NotADirectoryError: Either is not a directory.
            NotFoundError: There is no such directory in the sandbox.
            ShardConnectionError: It was cut on the way; nothing has landed.

        Example:
            >>> await sandbox.files.download_dir("/srv/site", "site")
        """
        target = os.fspath(local)
        if os.path.lexists(target) and not os.path.isdir(target):
            raise NotADirectoryError(f"{target} is not a directory")
        with tempfile.TemporaryFile() as spool:
            query = {"path": _checked(remote)}
            async with self._transport.open("GET", f"{self._base}/archive", query=query, streams=True) as response:
                if _stat_of(response.headers).type != "dir":
                    raise NotADirectoryError(f"{remote} is not a directory of the sandbox: use download()")
                pending: builtins.list[bytes] = []
                held = 0
                async for chunk in response.aiter_raw():
                    pending.append(chunk)
                    held += len(chunk)
                    if held >= _CHUNK:
                        await async_blocking(spool.writelines, pending)
                        pending, held = [], 0
                await async_blocking(spool.writelines, pending)
            spool.seek(0)
            await async_blocking(unpack, spool, target)

    def _query(self, path: str, mode: int | None, parents: bool, user: str | None) -> dict[str, str]:
        query = {"path": _checked(path)}
        bits = _octal(mode)
        if bits is not None:
            query["mode"] = bits
        if user is not None:
            query["user"] = user
        if parents:
            query["parents"] = "true"
        return query

    async def _put(
        self,
        route: str,
        query: dict[str, str],
        source: IO[bytes],
        size: int,
        *,
        whole: bool,
        media: str = "application/octet-stream",
        waits: bool = False,
    ) -> None:
        headers = {"Content-Type": media, "Content-Length": str(size)}
        content = _exactly(source, size, whole=whole) if size else b""
        if not size and whole and not await async_blocking(_at_end, source):
            raise UnknownLengthError("the source has more than the 0 bytes that it was said to have")
        path = f"{self._base}/{route}"
        async with self._transport.open("PUT", path, query=query, content=content, headers=headers, waits=waits):
            pass


def _stat_of(headers: Any) -> FileInfo:
    try:
        value = json.loads(headers.get(_STAT, ""))
    except ValueError:
        raise ProtocolError("the server's answer has no X-Shard-Stat header that can be read") from None
    return read(value, file_info, "a file's stat")


def _open_regular(local: str | os.PathLike[str]) -> tuple[IO[bytes], os.stat_result]:
    """Opens a regular file; never waits for the other end of a fifo."""
    source = open(local, "rb", opener=lambda path, flags: os.open(path, flags | getattr(os, "O_NONBLOCK", 0)))
    info = os.fstat(source.fileno())
    if not _stat.S_ISREG(info.st_mode):
        source.close()
        raise UnknownLengthError(f"{os.fspath(local)} is not a regular file: write() takes a stream with size=")
    return source, info


class _Landing:
    """A local file under a temporary name beside its target."""

    def __init__(self, target: str) -> None:
        self._target = target
        descriptor, self._temp = tempfile.mkstemp(prefix=".shard-", dir=os.path.dirname(target))
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        self._pending: list[bytes] = []
        self._held = 0

    def take(self, chunk: bytes) -> bool:
        """Keeps a chunk; whether it is time to flush."""
        self._pending.append(chunk)
        self._held += len(chunk)
        return self._held >= _CHUNK

    def flush(self) -> None:
        """Writes what was kept."""
        data = memoryview(b"".join(self._pending))
        self._pending.clear()
        self._held = 0
        while data:
            data = data[self._file.write(data) :]

    def land(self, mode: int) -> None:
        """Gives the file its name."""
        self.flush()
        os.chmod(self._temp, mode)
        self._file.close()
        os.replace(self._temp, self._target)
        self._temp = ""

    def drop(self) -> None:
        """Lets go of it; what has not landed is gone."""
        self._file.close()
        if self._temp:
            os.unlink(self._temp)
