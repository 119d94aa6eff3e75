#!/usr/bin/env python3
"""Writes the vectors that are bytes: frames.json and tar/*. It uses no code of any SDK.

conformance/make.py            write them
conformance/make.py --check    change nothing; fail when a file is not what would be written
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

MASK = bytes.fromhex("37fa213d")


# --- frames --------------------------------------------------------------------------------------------------------


def frame(
    opcode: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0, mask: bytes | None = None, width: int = 0
) -> bytes:
    """One frame; width forces the length field to 2 or 8 bytes."""
    size = len(payload)
    width = width or (0 if size < 126 else 2 if size < 1 << 16 else 8)
    head = bytes([(0x80 if fin else 0) | rsv << 4 | opcode])
    masked = 0x80 if mask else 0
    head += (
        bytes([masked | size]) if not width else bytes([masked | (126 if width == 2 else 127)]) + size.to_bytes(width, "big")
    )
    if mask:
        payload = bytes(b ^ mask[i % 4] for i, b in enumerate(payload))
        head += mask
    return head + payload


def frames() -> dict[str, Any]:
    text, binary, close, ping, pong, more = 1, 2, 8, 9, 10, 0
    big, huge = bytes(range(256)) * 256, b"\x01" + b"x" * (1 << 20)
    good: list[tuple[str, bytes, list[tuple[int, bytes]]]] = [
        ("an empty binary message", frame(binary), [(binary, b"")]),
        ("output", frame(binary, b"\x01hello"), [(binary, b"\x01hello")]),
        ("text of several bytes per character", frame(text, "é😀".encode()), [(text, "é😀".encode())]),
        ("125 bytes, the longest short length", frame(binary, big[:125]), [(binary, big[:125])]),
        ("126 bytes, the shortest two-byte length", frame(binary, big[:126]), [(binary, big[:126])]),
        ("65535 bytes, the longest two-byte length", frame(binary, big[:65535]), [(binary, big[:65535])]),
        ("65536 bytes, the shortest eight-byte length", frame(binary, big), [(binary, big)]),
        ("1 MiB and one byte, the longest that a server sends", frame(binary, huge), [(binary, huge)]),
        (
            "two messages in one read",
            frame(binary, b"\x01a") + frame(binary, b"\x02b"),
            [(binary, b"\x01a"), (binary, b"\x02b")],
        ),
        (
            "three fragments",
            frame(binary, b"\x01a", fin=False) + frame(more, b"b", fin=False) + frame(more, b"c"),
            [(binary, b"\x01abc")],
        ),
        (
            "a ping between two fragments",
            frame(binary, b"\x01a", fin=False) + frame(ping, b"p") + frame(more, b"b"),
            [(ping, b"p"), (binary, b"\x01ab")],
        ),
        (
            "a character split over two fragments of a text",
            frame(text, "é".encode()[:1], fin=False) + frame(more, "é".encode()[1:]),
            [(text, "é".encode())],
        ),
        (
            "empty fragments",
            frame(binary, b"", fin=False) + frame(more, b"", fin=False) + frame(more, b"\x01"),
            [(binary, b"\x01")],
        ),
        ("a ping with 125 bytes", frame(ping, big[:125]), [(ping, big[:125])]),
        ("an unasked pong", frame(pong, b"x"), [(pong, b"x")]),
        ("a close without a code", frame(close), [(close, b"")]),
        ("a close with a code", frame(close, b"\x03\xe8"), [(close, b"\x03\xe8")]),
        ("a close with a reason", frame(close, b"\x03\xe8stopped"), [(close, b"\x03\xe8stopped")]),
        ("a close with a code of an application", frame(close, b"\x0f\xa0"), [(close, b"\x0f\xa0")]),
        ("a length that is longer than it need be", frame(binary, b"\x01a", width=8), [(binary, b"\x01a")]),
    ]
    bad: list[tuple[str, bytes]] = [
        ("a masked frame of a server", frame(binary, b"\x01a", mask=MASK)),
        ("the first reserved bit", frame(binary, b"\x01a", rsv=4)),
        ("the second reserved bit", frame(binary, b"\x01a", rsv=2)),
        ("the third reserved bit", frame(binary, b"\x01a", rsv=1)),
        ("an unknown data opcode", frame(3, b"a")),
        ("an unknown control opcode", frame(11, b"a")),
        ("a fragmented ping", frame(ping, b"a", fin=False)),
        ("a ping with 126 bytes", frame(ping, b"a" * 126)),
        ("a continuation of nothing", frame(more, b"a")),
        ("a new message between fragments", frame(binary, b"a", fin=False) + frame(binary, b"b")),
        ("a message of 4 MiB and one byte, by its length alone", frame(binary, b"a" * (4 << 20 | 1))[:10]),
        ("a length with the highest bit set", bytes([0x82, 127]) + b"\xff" * 8),
        (
            "fragments of 4 MiB and one byte together",
            frame(binary, b"a" * (1 << 20), fin=False) + frame(more, b"a" * (3 << 20 | 1)),
        ),
        ("text that is not UTF-8", frame(text, b"\xff")),
        ("text that ends in the middle of a character", frame(text, "é".encode()[:1])),
        ("a close of one byte", frame(close, b"\x03")),
        ("a close with a code that must not be sent", frame(close, (1005).to_bytes(2, "big"))),
        ("a close with a code below 1000", frame(close, (999).to_bytes(2, "big"))),
        ("a close with a code above 4999", frame(close, (5000).to_bytes(2, "big"))),
        ("a close with a reason that is not UTF-8", frame(close, b"\x03\xe8\xff")),
    ]
    sent = [
        ("the end of the input", binary, b"\x04"),
        ("input", binary, b"\x00hello"),
        ("125 bytes", binary, b"\x00" * 125),
        ("126 bytes", binary, bytes(range(126))),
        ("65536 bytes", binary, big),
        ("a pong", pong, b"p"),
        ("a close", close, b"\x03\xe8"),
    ]
    return {
        "received": [
            {"about": a, "bytes": packed(b), "messages": [{"opcode": o, "payload": packed(p)} for o, p in m]}
            for a, b, m in good
        ],
        "refused": [{"about": a, "bytes": packed(b)} for a, b in bad],
        "sent": [
            {"about": a, "opcode": o, "payload": packed(p), "mask": MASK.hex(), "bytes": packed(frame(o, p, mask=MASK))}
            for a, o, p in sent
        ],
        "handshakes": [{"key": "dGhlIHNhbXBsZSBub25jZQ==", "accept": "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="}],
    }


def packed(data: bytes) -> list[Any]:
    """Bytes as pieces: hex, or [hex, count] for a repetition, so that a megabyte is a short line."""
    pieces: list[Any] = []
    at = 0
    while at < len(data):
        for unit in (1, 256):
            count = 1
            piece = data[at : at + unit]
            while data[at + count * unit : at + (count + 1) * unit] == piece and len(piece) == unit:
                count += 1
            if count * unit >= 32 and count > 1:
                pieces.append([piece.hex(), count])
                at += count * unit
                break
        else:
            if pieces and isinstance(pieces[-1], str):
                pieces[-1] += data[at : at + 1].hex()
            else:
                pieces.append(data[at : at + 1].hex())
            at += 1
    return pieces


# --- tars ----------------------------------------------------------------------------------------------------------


def entry(
    name: str | bytes,
    kind: str = "0",
    data: bytes = b"",
    *,
    link: str | bytes = "",
    mode: int = 0o644,
    size: int | None = None,
    mtime: int = 1_700_000_000,
) -> bytes:
    """One entry of a ustar."""
    name = name.encode() if isinstance(name, str) else name
    link = link.encode() if isinstance(link, str) else link
    long = size if size is not None else len(data)
    head = bytearray(512)
    head[0:100] = name.ljust(100, b"\0")[:100]
    head[100:108] = b"%07o\0" % mode
    head[108:116] = head[116:124] = b"%07o\0" % 0
    head[124:136] = b"%011o\0" % long
    head[136:148] = b"%011o\0" % mtime
    head[148:156] = b" " * 8
    head[156:157] = kind.encode()
    head[157:257] = link.ljust(100, b"\0")[:100]
    head[257:265] = b"ustar\x0000"
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + data + b"\0" * (-len(data) % 512)


def pax(**records: bytes) -> bytes:
    """An extended header."""
    body = b""
    for key, value in records.items():
        rest = b" " + key.encode() + b"=" + value + b"\n"
        size = len(rest) + 1
        while len(str(size)) + len(rest) != size:
            size = len(str(size)) + len(rest)
        body += str(size).encode() + rest
    return entry("PaxHeaders/x", "x", body)


END = b"\0" * 1024
TOP = entry("top", "5", mode=0o755)


def tars() -> dict[str, tuple[bytes, dict[str, Any]]]:
    """Each tar: its bytes, and what becomes of it. `holds` lists what must be there, `refused` says that it must fail."""

    def whole(*parts: bytes) -> bytes:
        return TOP + b"".join(parts) + END

    good: dict[str, tuple[bytes, dict[str, Any]]] = {
        "plain": (
            whole(entry("top/a", data=b"hello\n", mode=0o640), entry("top/d", "5", mode=0o750), entry("top/d/b", data=b"b")),
            {"holds": {"a": {"data": "hello\n", "mode": "0640"}, "d": {"dir": True, "mode": "0750"}, "d/b": {"data": "b"}}},
        ),
        "empty": (TOP + END, {"holds": {}}),
        "dot-top": (entry("./", "5", mode=0o755) + entry("./a", data=b"a") + END, {"holds": {"a": {"data": "a"}}}),
        "missing-parents": (whole(entry("top/x/y/z", data=b"z")), {"holds": {"x/y/z": {"data": "z"}}}),
        "links": (
            whole(
                entry("top/a", data=b"a"),
                entry("top/hard", "1", link="top/a"),
                entry("top/soft", "2", link="a"),
                entry("top/d", "5", mode=0o755),
                entry("top/d/up", "2", link="../a"),
                entry("top/nowhere", "2", link="missing"),
                entry("top/loop", "2", link="loop"),
            ),
            {
                "holds": {
                    "hard": {"data": "a"},
                    "soft": {"link": "a"},
                    "d/up": {"link": "../a"},
                    "nowhere": {"link": "missing"},
                    "loop": {"link": "loop"},
                }
            },
        ),
        "special-bits": (
            whole(
                entry("top/setuid", data=b"x", mode=0o4755),
                entry("top/sticky", "5", mode=0o1777),
                entry("top/setgid", "5", mode=0o2755),
            ),
            {"holds": {"setuid": {"mode": "0755"}, "sticky": {"mode": "1777"}, "setgid": {"mode": "0755"}}},
        ),
        "read-only-directory": (
            whole(entry("top/d", "5", mode=0o555), entry("top/d/a", data=b"a")),
            {"holds": {"d": {"mode": "0555"}, "d/a": {"data": "a"}}},
        ),
        "long-name": (
            whole(pax(path=b"top/" + b"n" * 200), entry("top/short", data=b"long")),
            {"holds": {"n" * 200: {"data": "long"}}},
        ),
        "odd-names": (
            whole(entry("top/new\nline", data=b"1"), entry("top/back\\slash", data=b"2"), entry("top/ space ", data=b"3")),
            {"holds": {"new\nline": {"data": "1"}, "back\\slash": {"data": "2"}, " space ": {"data": "3"}}},
        ),
        "replaced": (
            whole(entry("top/a", data=b"old"), entry("top/a", data=b"new")),
            {"holds": {"a": {"data": "new"}}},
        ),
        "below-a-link-inside": (
            whole(entry("top/d", "5", mode=0o755), entry("top/l", "2", link="d"), entry("top/l/a", data=b"a")),
            {"holds": {"d/a": {"data": "a"}}},
        ),
        "padded": (whole(entry("top/a", data=b"a")) + b"\0" * 9216, {"holds": {"a": {"data": "a"}}}),
    }
    refused = {
        "absolute-name": entry("/etc/canary", data=b"x"),
        "dot-dot": entry("top/../../canary", data=b"x"),
        "dot-dot-inside": entry("top/d/../a", data=b"x"),
        "other-top": entry("elsewhere/a", data=b"x"),
        "empty-name": entry("", data=b"x"),
        "pax-absolute-name": pax(path=b"/etc/canary") + entry("top/a", data=b"x"),
        "pax-name-with-nul": pax(path=b"top/a\0b") + entry("top/a", data=b"x"),
        "symlink-absolute": entry("top/l", "2", link="/etc"),
        "symlink-climbs": entry("top/l", "2", link="../canary"),
        "symlink-climbs-late": entry("top/d", "5") + entry("top/d/l", "2", link="../d/../../canary"),
        "symlink-empty": entry("top/l", "2"),
        "symlink-chain": entry("top/x", "2", link=".") + entry("top/y", "2", link="x/../canary"),
        "symlink-swapped-below": entry("top/d", "5", mode=0o755)
        + entry("top/d/l", "2", link="../a")
        + entry("top/a", "2", link="d/..")
        + entry("top/z", "2", link="a/../canary"),
        "below-a-link-outside": entry("top/l", "2", link="..") + entry("top/l/canary", data=b"x"),
        "hardlink-absolute": entry("top/h", "1", link="/etc/passwd"),
        "hardlink-dot-dot": entry("top/h", "1", link="top/../../canary"),
        "hardlink-to-nothing": entry("top/h", "1", link="top/missing"),
        "hardlink-to-a-symlink": entry("top/l", "2", link="a") + entry("top/h", "1", link="top/l"),
        "hardlink-forward": entry("top/h", "1", link="top/a") + entry("top/a", data=b"a"),
        "character-device": entry("top/dev", "3"),
        "block-device": entry("top/dev", "4"),
        "fifo": entry("top/fifo", "6"),
        "unknown-type": entry("top/a", "Z"),
        "file-as-top": entry("top", data=b"x"),
        "file-as-parent": entry("top/a", data=b"x") + entry("top/a/b", data=b"x"),
        "file-over-directory": entry("top/d", "5") + entry("top/d/a", data=b"x") + entry("top/d", data=b"x"),
        "too-large": pax(size=str(65 << 30).encode()) + entry("top/a"),
        "pax-header-too-large": entry("PaxHeaders/x", "x", size=8 << 20),
        "pax-header-broken": entry("PaxHeaders/x", "x", b"999999 path=x\n") + entry("top/a", data=b"x"),
        "size-negative": pax(size=b"-1") + entry("top/a", data=b"x"),
    }
    bad = {name: (whole(body), {"refused": True}) for name, body in refused.items()}
    a = entry("top/a", data=b"a" * 600)
    bad |= {
        "cut-in-a-file": ((TOP + a)[:-1000], {"refused": True}),
        "cut-in-a-header": ((TOP + a)[:700], {"refused": True}),
        "cut-before-the-end": (TOP + a, {"refused": True}),
        "cut-in-the-end": (TOP + a + END[:512], {"refused": True}),
        "nothing": (b"", {"refused": True}),
        "not-a-tar": (b"hello\n" * 200, {"refused": True}),
        "bad-checksum": (TOP + a.replace(b"top/a", b"top/b") + END, {"refused": True}),
        "two-tars": (TOP + a + END + TOP + a + END, {"refused": True}),
    }
    return good | bad


def written() -> dict[str, bytes]:
    """Every file that this script makes."""
    files = {"frames.json": json.dumps(frames(), indent=1, ensure_ascii=False).encode() + b"\n"}
    index = {}
    for name, (data, expected) in sorted(tars().items()):
        files[f"tar/{name}.tar"] = data
        index[name] = expected
    files["tar/index.json"] = json.dumps(index, indent=1, ensure_ascii=False).encode() + b"\n"
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail when something would change")
    check = parser.parse_args().check
    say: Callable[[str], object] = lambda text: print(text, file=sys.stderr)  # noqa: E731
    failed = False
    files = written()
    for name, data in files.items():
        path = HERE / name
        if path.exists() and path.read_bytes() == data:
            continue
        if check:
            say(f"conformance/{name} is not what make.py writes")
            failed = True
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
    for stale in sorted(str(p.relative_to(HERE)) for p in HERE.glob("tar/*")):
        if stale not in files:
            say(f"conformance/{stale} is made by nothing: remove it")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
