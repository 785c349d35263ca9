"""Damage to zip archives (.npz, .pt, .pruned_init), to the arrays and pickles in them, and hostile pickles."""

import importlib
import io
import os
import pickle
import pickletools
import re
import struct
import subprocess
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from hypothesis import strategies as st

from tests.fuzzing.formats import CODE, HOSTILE_INTS, MARKER, any_bytes


def archive(draw: st.DrawFn, content: bytes) -> bytes:
    """A zip archive (.npz, .pt) with one member changed, renamed, doubled, left out, or packed 1000 to 1."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    index = draw(st.integers(0, len(members) - 1))
    name, data = members[index]
    match draw(st.sampled_from(("change",) * 10 + ("rename", "double", "remove", "swap", "claim", "bomb"))):
        case "change":
            members[index] = name, _member(draw, name, data)
        case "rename":
            names = st.sampled_from(("", "../x", "x/data.pkl", "/etc/x", "a\0b", "x.npy")) | st.text(max_size=6)
            members[index] = draw(names).encode("utf-8", "replace").decode(), data
        case "double":
            members.append((name, _member(draw, name, data)))
        case "remove":
            del members[index]
        case "swap":
            members[index] = name, members[draw(st.integers(0, len(members) - 1))][1]
        case "claim":
            return zip_of(members, {index: _Packed(data, 0, draw(st.sampled_from((0, 1, 1 << 31, (1 << 32) - 2))), 0)})
        case "bomb":
            return zip_of(members, {index: bomb(data)})
    return zip_of(members)


@dataclass(frozen=True)
class _Packed:
    """What an archive holds of a member and says about it."""

    content: bytes
    method: int  # 0 stored, 8 deflated
    size: int
    checksum: int


def zip_of(members: list[tuple[str, bytes]], packed: dict[int, _Packed] | None = None) -> bytes:
    """A zip archive, stored but for `packed`: member number -> what stands in its place."""
    file, directory = io.BytesIO(), b""
    for index, (name, data) in enumerate(members):
        member = (packed or {}).get(index) or _Packed(data, 0, len(data), zlib.crc32(data))
        text = name.encode()
        sizes = struct.pack("<LLLHH", member.checksum, len(member.content), member.size, len(text), 0)
        common = struct.pack("<HHHHH", 20, 0x800, member.method, 0, 33) + sizes
        directory += b"PK\1\2\x14\0" + common + struct.pack("<HHHLL", 0, 0, 0, 0, file.tell()) + text
        file.write(b"PK\3\4" + common + text + member.content)
    end = struct.pack("<HHHHLLH", 0, 0, len(members), len(members), len(directory), file.tell(), 0)
    return file.getvalue() + directory + b"PK\5\6" + end


def bomb(data: bytes) -> _Packed:
    """The data, continued by a GiB of zeros in one MB."""
    start = zlib.compressobj(9, zlib.DEFLATED, -15)
    blocks, size, checksum = _zeros()
    content = start.compress(data) + start.flush(zlib.Z_FULL_FLUSH) + blocks
    return _Packed(content, 8, len(data) + size, checksum)


@cache
def _zeros() -> tuple[bytes, int, int]:
    """A deflate stream of zeros made of equal blocks, what it unpacks to, and a checksum (of no importance)."""
    block = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = block.compress(bytes(1 << 20)) + block.flush(zlib.Z_FULL_FLUSH)
    return packed * 1024 + b"\3\0", 1 << 30, 0


def _member(draw: st.DrawFn, name: str, data: bytes) -> bytes:
    if name.endswith(".pkl"):
        return pickled(draw, data)
    if data.startswith(b"\x93NUMPY"):
        return npy(draw, data)
    return any_bytes(draw, data)


def npy(draw: st.DrawFn, content: bytes) -> bytes:
    """Another shape or type in the header, the data as they were."""
    end = 10 + struct.unpack("<H", content[8:10])[0]
    header = content[10:end].decode("latin1")
    if draw(st.integers(0, 3)) == 0:
        return any_bytes(draw, content[:end]) + content[end:]
    shapes = ("(1000000000000000,)", "(-1,)", "()", "(0,)", "(1, 2)", "(4294967296, 4294967296)", "(True,)", "('a',)")
    types = ("'|O'", "'<U1000000000'", "'|V0'", "'<f8'", "'|u1'", "'>i8'", "'<M8[ns]'", "[('a', '|O')]", "'|S0'", CODE)
    if draw(st.booleans()):
        header = re.sub(r"\(.*?\)", draw(st.sampled_from(shapes)), header)
    else:
        header = re.sub(r"'descr': '[^']*'", f"'descr': {draw(st.sampled_from(types))}", header)
    text = header.rstrip().encode("latin1") + b"\n"
    return content[:8] + struct.pack("<H", len(text)) + text + content[end:]


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


HOSTILE_PICKLES = tuple(
    pickle.dumps(value, protocol=2)
    for value in (
        Call(os.mkdir, MARKER), Call(eval, CODE), Call(exec, CODE), Call(os.system, f"mkdir {MARKER}"),
        Call(subprocess.Popen, ["mkdir", MARKER]), Call(open, MARKER, "w"),
        Call(bytearray, 1 << 40), Call(importlib.import_module, "this"), {"a": Call(os.mkdir, MARKER)},
        [[]], {}, "x", 1 << 400, None,
    )
)  # fmt: skip
_GLOBALS = (
    "os mkdir", "posix system", "builtins eval", "builtins getattr", "builtins bytearray", "_codecs encode",
    "numpy dtype", "numpy ndarray", "numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct",
    "collections OrderedDict", "torch FloatStorage", "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter", "torch._utils _rebuild_sparse_tensor", "torch Size", "torch device",
    "torch.serialization _get_layout",
)  # fmt: skip
_TEXTS = (b"", b"b", b"f8", b"O", b"<", b"|", b"latin1", CODE.encode())
_INSTRUCTIONS = (
    *(b"c" + name.replace(" ", "\n").encode() + b"\n" for name in _GLOBALS),
    *(b"K" + bytes([number]) for number in (0, 1, 3, 8)),
    *(pickle.dumps(number, 2)[2:-1] for number in HOSTILE_INTS),
    *(b"X" + struct.pack("<L", len(text)) + text for text in _TEXTS),
    # texts and bytes of absurd lengths, the memo at absurd numbers
    b"X\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 8, b"\x8e" + b"\xff" * 7 + b"\x7f",
    b"j\xff\xff\xff\x7f", b"r\xff\xff\xff\x7f",
    # constants, containers, calls, states, the memo
    b"N", b"\x88", b"\x89", b")", b"}", b"]", b"(", b"\x85", b"\x86", b"\x87", b"t", b"d", b"l", b"R", b"R", b"R", b"b",
    b"b", b"\x81", b"2", b"0", b"q\0", b"h\0", b"q\1", b"h\1", b"Q", b"s", b"u", b"a", b"e", b"\x93", b"\x82\1",
    b"i" + b"os\nmkdir\n", b"o", b"1",
)  # fmt: skip
# Programs for the pickle machine: most stop it soon, some build what no program would have saved.
pickle_programs = st.lists(st.sampled_from(_INSTRUCTIONS), min_size=1, max_size=25).map(
    lambda instructions: b"\x80\2" + b"".join(instructions) + b"."
)


def pickled(draw: st.DrawFn, content: bytes) -> bytes:
    """A pickle with other numbers, calls put in between, or made of other instructions."""
    choice = draw(st.integers(0, 9))
    if choice == 0:
        return draw(st.sampled_from(HOSTILE_PICKLES))
    if choice <= 3:
        return draw(pickle_programs)
    if choice == 4:
        return any_bytes(draw, content)
    steps = _instructions(content)
    for _ in range(draw(st.integers(1, 3))):
        index = draw(st.integers(1, len(steps) - 1))
        match draw(st.sampled_from(("number", "number", "swap", "remove", "insert", "call"))):
            case "number":
                numbers = [i for i, step in enumerate(steps) if step[:1] in b"KMJ\x8a"]
                where = draw(st.sampled_from(numbers)) if numbers else index
                steps[where] = pickle.dumps(draw(st.sampled_from(HOSTILE_INTS)), 2)[2:-1]
            case "swap":
                other = draw(st.integers(1, len(steps) - 1))
                steps[index], steps[other] = steps[other], steps[index]
            case "remove":
                del steps[index]
            case "insert":
                steps[index:index] = [draw(pickle_programs)[2:-1]]
            case "call":
                steps[index:index] = [draw(st.sampled_from(HOSTILE_PICKLES))[2:-1]]
    return b"".join(steps)


def _instructions(content: bytes) -> list[bytes]:
    starts = [position for _, _, position in pickletools.genops(content)]
    return [content[start:end] for start, end in zip(starts, [*starts[1:], len(content)], strict=True)]
