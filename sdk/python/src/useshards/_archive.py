"""Directories as tars: packing one of this machine, and unpacking one that came out of a sandbox, which is hostile.

The reader is our own: the standard library's takes a tar that was cut for a whole one, and reads headers of any size
into memory. The unpacker reaches every path from the target's descriptor, one name at a time.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
import uuid
from collections.abc import Callable, Iterator
from typing import IO

from attrs import define

from ._errors import UnknownLengthError, UnsafeArchiveError

MAX_BYTES = 64 << 30
MAX_ENTRIES = 1 << 20

_MAX_HEADER = 1 << 20
_MAX_NAME = 4096
_MAX_PADDING = 16 << 20
_COPY = 1 << 20
_BLOCK = 512


# --- packing -------------------------------------------------------------------------------------------------------


def pack(local: str, out: IO[bytes]) -> int:
    """Writes the contents of a directory as a tar whose top is "."; returns its length in bytes and rewinds it."""
    if not stat.S_ISDIR(os.stat(local).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), local)
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        pending = [(os.path.join(local, "."), ".")]
        while pending:
            path, name = pending.pop()
            if _add(tar, path, name):
                prefix = "" if name == "." else name + "/"
                pending += [(os.path.join(path, child), prefix + child) for child in sorted(os.listdir(path), reverse=True)]
    size = out.tell()
    out.seek(0)
    return size


def _add(tar: tarfile.TarFile, path: str, name: str) -> bool:
    """Adds one path; whether it is a directory, whose children are next."""
    info: tarfile.TarInfo | None = tar.gettarinfo(path, arcname=name)
    if info is None or not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
        return False  # a socket, fifo or device
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode &= 0o1777
    if info.isreg():
        with open(path, "rb") as contents:
            if os.fstat(contents.fileno()).st_size != info.size:
                raise UnknownLengthError(f"{path} changed its length while it was packed")
            try:
                tar.addfile(info, contents)
            except OSError as exc:
                if exc.errno is None:  # tarfile's own: the file ended early
                    raise UnknownLengthError(f"{path} became shorter while it was packed") from None
                raise
            if contents.read(1):
                raise UnknownLengthError(f"{path} grew while it was packed")
        return False
    tar.addfile(info)
    return info.isdir()


# --- reading -------------------------------------------------------------------------------------------------------


@define
class _Entry:
    name: bytes
    kind: bytes
    link: bytes
    size: int
    mode: int
    mtime: float


def _shown(name: bytes) -> str:
    return name[:200].decode("utf-8", "backslashreplace")


def _entries(tar: IO[bytes]) -> Iterator[_Entry]:
    """The entries of a tar; the contents of a file are next in `tar` when it is yielded. Ends only at a real end."""
    count, extra = 0, dict[str, bytes]()
    last = b""
    while True:
        block = tar.read(_BLOCK)
        if len(block) < _BLOCK:
            raise UnsafeArchiveError(_shown(last), "the archive was cut: it ends before its end mark")
        if not any(block):
            _finish(tar)
            return
        if _number(block[148:156]) != sum(block[:148]) + sum(block[156:]) + 8 * 32:
            raise UnsafeArchiveError(_shown(last), "the archive cannot be read after this entry: a header is damaged")
        kind, size = block[156:157], _number(block[124:136])
        if kind in b"xgLK":
            if size > _MAX_HEADER:
                raise UnsafeArchiveError(_shown(last), "the archive has an extended header of more than 1 MiB after this entry")
            data = tar.read(size)
            if len(data) < size or len(tar.read(-size % _BLOCK)) < -size % _BLOCK:
                raise UnsafeArchiveError(_shown(last), "the archive was cut: it ends before its end mark")
            if kind == b"x":
                extra.update(_pax(data))
            elif kind != b"g":
                extra["path" if kind == b"L" else "linkpath"] = data.split(b"\0", 1)[0]
            continue
        count += 1
        if count > MAX_ENTRIES:
            raise UnsafeArchiveError("", f"the archive has more than {MAX_ENTRIES} entries")
        name = block[:100].split(b"\0", 1)[0]
        if block[257:263] == b"ustar\0" and block[345]:
            name = block[345:500].split(b"\0", 1)[0] + b"/" + name
        last = extra.get("path", name)
        try:
            size = int(extra.get("size", size))
            mtime = float(extra.get("mtime", _number(block[136:148])))
        except ValueError:
            size, mtime = -1, 0.0
        if size < 0 or not abs(mtime) < 1 << 40 or any(k.startswith("GNU.sparse") for k in extra):
            raise UnsafeArchiveError(_shown(last), "has a header that cannot be read, or is sparse")
        link = extra.get("linkpath", block[157:257].split(b"\0", 1)[0])
        extra = {}
        if kind in (b"0", b"\0", b"7") and last.endswith(b"/"):
            kind = b"5"
        entry = _Entry(last, kind, link, size if kind in (b"0", b"\0", b"7") else 0, _number(block[100:108]) & 0o7777, mtime)
        begin = tar.tell()
        yield entry
        tar.seek(begin + entry.size + -entry.size % _BLOCK)


def _finish(tar: IO[bytes]) -> None:
    """After the first zero block: a second one, and nothing but a bounded padding of zeros."""
    rest = 0
    while data := tar.read(64 << 10):
        rest += len(data)
        if any(data) or rest > _MAX_PADDING:
            raise UnsafeArchiveError("", "something follows the end mark of the archive")
    if rest < _BLOCK:
        raise UnsafeArchiveError("", "the archive was cut: it ends before its end mark")


def _number(field: bytes) -> int:
    """A number of a header, octal or binary; -1 when it is neither."""
    if field[0] in (0x80, 0xFF):
        value = int.from_bytes(field[1:], "big")
        return value if field[0] == 0x80 else value - (1 << 8 * (len(field) - 1))
    text = field.strip(b" \0")
    try:
        return int(text, 8) if text else 0
    except ValueError:
        return -1


def _pax(data: bytes) -> dict[str, bytes]:
    records: dict[str, bytes] = {}
    while data.strip(b"\0"):
        length, _, _ = data.partition(b" ")
        if (
            not length.isdigit()
            or not len(length) + 1 < int(length[:9]) <= len(data)
            or data[int(length) - 1 : int(length)] != b"\n"
        ):
            raise UnsafeArchiveError("", "the archive has an extended header that cannot be read")
        key, equal, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        if not equal:
            raise UnsafeArchiveError("", "the archive has an extended header that cannot be read")
        records[key.decode("utf-8", "replace")] = value
        data = data[int(length) :]
    return records


# --- unpacking -----------------------------------------------------------------------------------------------------


def unpack(tar: IO[bytes], target: str) -> None:
    """Unpacks the tree in `tar` so that the contents of its top directory become the contents of `target`."""
    os.makedirs(target, exist_ok=True)
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        unpacker = _Unpacker(tar, root)
        try:
            unpacker.run()
        finally:
            unpacker.check_links()  # also after a failure: they stay on the disk
    finally:
        os.close(root)


# Makes something under a temporary name; the device and inode of a file, None of a link.
_Maker = Callable[[tuple[bytes, ...], _Entry, int, bytes], "tuple[int, int] | None"]


class _Unpacker:
    def __init__(self, tar: IO[bytes], root: int) -> None:
        self._tar = tar
        self._root = root
        self._top: bytes | None = None
        self._bytes = 0
        self._files: dict[tuple[bytes, ...], tuple[int, int]] = {}  # written by this unpack: what a hard link may mean
        self._links: list[tuple[bytes, ...]] = []
        self._dirs: dict[tuple[bytes, ...], tuple[int, float] | None] = {}  # made by this unpack, with mode and time

    def run(self) -> None:
        for entry in _entries(self._tar):
            try:
                self._entry(entry)
            except UnicodeEncodeError:
                raise UnsafeArchiveError(_shown(entry.name), "has a name that this machine cannot hold") from None
        for path, attributes in reversed(self._dirs.items()):
            if attributes is not None:
                self._finish_dir(path, *attributes)

    def _entry(self, entry: _Entry) -> None:
        path = self._path(entry.name, entry.name, "name")
        if entry.kind == b"5":
            self._dir(path, entry)
            return
        if not path:
            raise UnsafeArchiveError(_shown(entry.name), "is the top of the archive and is not a directory")
        if entry.kind in (b"0", b"\0", b"7"):
            self._land(path, entry, self._file)
        elif entry.kind == b"2":
            self._land(path, entry, self._symlink)
        elif entry.kind == b"1":
            self._land(path, entry, self._hardlink)
        elif entry.kind in (b"3", b"4"):
            raise UnsafeArchiveError(_shown(entry.name), "is a device node")
        elif entry.kind == b"6":
            raise UnsafeArchiveError(_shown(entry.name), "is a fifo")
        else:
            raise UnsafeArchiveError(_shown(entry.name), f"has the unknown type {entry.kind!r}")

    def _path(self, name: bytes, entry: bytes, what: str) -> tuple[bytes, ...]:
        """A name of the archive as path below the target, without the archive's own top directory."""
        if not name or len(name) > _MAX_NAME or b"\0" in name:
            raise UnsafeArchiveError(_shown(entry), f"has a {what} that is empty, too long or holds a NUL")
        if name.startswith(b"/"):
            raise UnsafeArchiveError(_shown(entry), f"has an absolute {what}")
        parts = [part for part in name.split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            raise UnsafeArchiveError(_shown(entry), f'has ".." in its {what}')
        if self._top is None:
            self._top = parts[0] if parts else b"."
        if self._top == b".":
            return tuple(parts)
        if not parts or parts[0] != self._top:
            raise UnsafeArchiveError(_shown(entry), f"has a {what} outside of the directory that was asked for")
        return tuple(parts[1:])

    def _dir(self, path: tuple[bytes, ...], entry: _Entry) -> None:
        made = self._make_dirs(path, entry.name)
        os.close(made)
        if path in self._dirs:
            self._dirs[path] = (entry.mode & 0o1777, entry.mtime)

    def _make_dirs(self, path: tuple[bytes, ...], entry: bytes) -> int:
        """The descriptor of a directory, made with its parents where they are missing."""
        for depth in range(1, len(path) + 1):
            parent = self._resolve(path[: depth - 1], entry)
            try:
                os.mkdir(path[depth - 1], 0o700 if depth == len(path) else 0o755, dir_fd=parent)
                self._dirs[path[:depth]] = None
            except FileExistsError:
                pass
            finally:
                os.close(parent)
        return self._resolve(path, entry)

    def _resolve(self, path: tuple[bytes, ...], entry: bytes) -> int:
        """Opens a directory below the target. Links are followed by hand, as long as they stay inside."""
        fds = [os.dup(self._root)]
        pending, hops = list(path), 0
        try:
            while pending:
                part = pending.pop(0)
                if part in (b"", b"."):
                    continue
                if part == b"..":
                    if len(fds) == 1:
                        raise UnsafeArchiveError(_shown(entry), "leads out of the target through a symbolic link")
                    os.close(fds.pop())
                    continue
                try:
                    fds.append(os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fds[-1]))
                    continue
                except OSError as exc:
                    if exc.errno not in (errno.ELOOP, errno.ENOTDIR):
                        raise
                try:
                    link = os.readlink(part, dir_fd=fds[-1])
                except OSError:
                    raise UnsafeArchiveError(_shown(entry), "needs a directory where there is something else") from None
                hops += 1
                if link.startswith(b"/"):
                    raise UnsafeArchiveError(_shown(entry), "leads out of the target through a symbolic link")
                if hops > 40:
                    raise UnsafeArchiveError(_shown(entry), "leads through a loop of symbolic links")
                pending[:0] = link.split(b"/")
            return fds.pop()
        finally:
            for fd in fds:
                os.close(fd)

    def _land(self, path: tuple[bytes, ...], entry: _Entry, make: _Maker) -> None:
        """Makes something under a temporary name and gives it its own."""
        parent = self._make_dirs(path[:-1], entry.name)
        temp = b".shard-" + uuid.uuid4().hex.encode() + b".tmp"
        try:
            try:
                written = make(path, entry, parent, temp)
                os.replace(temp, path[-1], src_dir_fd=parent, dst_dir_fd=parent)
            except IsADirectoryError:
                raise UnsafeArchiveError(_shown(entry.name), "would replace a directory") from None
            finally:
                try:
                    os.unlink(temp, dir_fd=parent)  # also after a rename onto another name of the same file
                except FileNotFoundError:
                    pass
        finally:
            os.close(parent)
        self._files.pop(path, None)
        if written is None:
            self._links.append(path)
        else:
            self._files[path] = written

    def _file(self, path: tuple[bytes, ...], entry: _Entry, parent: int, temp: bytes) -> tuple[int, int]:
        self._bytes += entry.size
        if self._bytes > MAX_BYTES:
            raise UnsafeArchiveError(_shown(entry.name), "is beyond the 64 GiB that one archive may hold")
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=parent)
        with os.fdopen(fd, "wb", buffering=0) as out:
            left = entry.size
            while left:
                data = self._tar.read(min(left, _COPY))
                if not data:
                    raise UnsafeArchiveError(_shown(entry.name), "the archive was cut: it ends in the middle of this file")
                left -= len(data)
                view = memoryview(data)
                while view:
                    view = view[out.write(view) :]
            os.fchmod(fd, entry.mode & 0o1777)
            os.utime(fd, (entry.mtime, entry.mtime))
            info = os.fstat(fd)
        return info.st_dev, info.st_ino

    def _symlink(self, path: tuple[bytes, ...], entry: _Entry, parent: int, temp: bytes) -> None:
        link = entry.link
        if not link or len(link) >= _MAX_NAME or b"\0" in link:
            raise UnsafeArchiveError(_shown(entry.name), "is a symbolic link whose target is empty, too long or holds a NUL")
        if link.startswith(b"/"):
            raise UnsafeArchiveError(_shown(entry.name), f"is a symbolic link to the absolute path {_shown(link)}")
        depth = len(path) - 1
        for part in link.split(b"/"):
            depth += -1 if part == b".." else part not in (b"", b".")
            if depth < 0:
                raise UnsafeArchiveError(_shown(entry.name), f"is a symbolic link to {_shown(link)}, outside of the target")
        os.symlink(link, temp, dir_fd=parent)

    def _hardlink(self, path: tuple[bytes, ...], entry: _Entry, parent: int, temp: bytes) -> tuple[int, int]:
        source = self._path(entry.link, entry.name, "hard link's target")
        written = self._files.get(source)
        if written is None:
            raise UnsafeArchiveError(
                _shown(entry.name), f"is a hard link to {_shown(entry.link)}, no file of this archive before it"
            )
        origin = self._resolve(source[:-1], entry.name)
        try:
            os.link(source[-1], temp, src_dir_fd=origin, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(origin)
        info = os.stat(temp, dir_fd=parent, follow_symlinks=False)
        if (info.st_dev, info.st_ino) != written:
            raise UnsafeArchiveError(_shown(entry.name), "is a hard link to a file that was changed meanwhile")
        return written

    def _finish_dir(self, path: tuple[bytes, ...], mode: int, mtime: float) -> None:
        fd = self._resolve(path, b"/".join(path))
        try:
            os.fchmod(fd, mode)
            os.utime(fd, (mtime, mtime))
        finally:
            os.close(fd)

    def check_links(self) -> None:
        """Follows every link now that all are there: links that are harmless one by one can lead out together."""
        first: UnsafeArchiveError | None = None
        for path in self._links:
            try:
                os.close(self._resolve(path, b"/".join(path)))
            except UnsafeArchiveError as exc:
                if "leads out" not in exc.reason:
                    continue  # a link to a file, or a loop
                parent = self._resolve(path[:-1], b"/".join(path))
                try:
                    os.unlink(path[-1], dir_fd=parent)
                except FileNotFoundError:
                    pass
                finally:
                    os.close(parent)
                first = first or exc
            except OSError:
                continue  # leads nowhere
        if first is not None:
            raise first
