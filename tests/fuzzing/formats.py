"""Damage that knows the format: the file stays well-formed enough to get past the first check.

Every function takes hypothesis' `draw` and the bytes of a valid file, and returns the bytes of a damaged one.
"""

import json
import re
import struct
from typing import Any

from hypothesis import strategies as st

MARKER = "code_ran"  # a folder that hostile code makes where it runs; the harness looks for it
CODE = f"__import__('os').mkdir('{MARKER}')"
# The same as one word of a BDDL file, where parentheses and blanks end words: the comprehension makes indexing a call.
CODE_WORD = f"""[quit["__import__\\x28'os'\\x29.mkdir\\x28'{MARKER}'\\x29"]for[quit.__class__.__getitem__]in[[exec]]]"""

# JSON texts, some of which no dump would write.
HOSTILE_JSON = (
    "null", "true", "false", "0", "-1", "1", "2", "0.5", "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "-0.0",
    "1000000000000000", "9007199254740993", "9223372036854775807", "9223372036854775808", "-9223372036854775809",
    "1" + "0" * 400, "7" * 1_000_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 50_000 + "1" + "}" * 50_000,
    '""', '"x"', '"' + "A" * 200_000 + '"', '"\\ud800"', '"a\\u0000b"', '"\\n"', '"\\u001b[2J"', '"\\u2028"',
    '"../../../etc/passwd"', '"/dev/zero"', '"hf-hub:nobody/nothing"', f'"{CODE}"', '"cuda:7"', '"-"', '"1"',
    "[]", "{}", "[[]]", "[null]", '{"": null}', '{"a": 1, "a": 2}', "[0, 0, 0]", "[1e308, -1e308]", '[["a"]]',
    "[" + ",".join(["0"] * 100_000) + "]",
)  # fmt: skip
HOSTILE_INTS = (
    -1,
    0,
    1,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    10**15,
    (1 << 63) - 1,
    1 << 63,
    1 << 64,
    10**40,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)


def any_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Flips, cuts, repetitions and insertions; half of them near the ends, where formats keep their sizes."""
    if not content:
        return draw(st.binary(max_size=40))
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        size = len(data)
        near = min(size, 400)
        start = draw(st.integers(0, size) | st.integers(0, near) | st.integers(size - near, size))
        end = min(size, start + draw(st.integers(0, 16) | st.integers(0, 4096)))
        match draw(st.sampled_from(("flip", "set", "cut", "truncate", "repeat", "insert"))):
            case "flip" if start < size:
                data[start] ^= 1 << draw(st.integers(0, 7))
            case "set" | "flip":
                data[start:end] = draw(st.sampled_from((b"\0", b"\xff", b"\x7f", b"9", b'"', b"(", b"\n"))) * (
                    end - start
                )
            case "cut":
                del data[start:end]
            case "truncate":
                del data[start:]
            case "repeat":
                data[start:start] = data[start:end] * draw(st.integers(1, 3))
            case "insert":
                data[start:start] = draw(st.binary(max_size=12))
    return bytes(data)


def json_text(draw: st.DrawFn, content: bytes) -> bytes:
    """Some values replaced, keys renamed, doubled or left out."""
    document = json.loads(content)
    raw: dict[str, str] = {}
    for number in range(draw(st.sampled_from((1, 1, 2, 3)))):
        document = _changed(draw, document, f"@@{number}@@", raw)
    text = json.dumps(document)
    for placeholder, value in raw.items():
        text = text.replace(f'"{placeholder}"', value)
    return text.encode()


def _changed(draw: st.DrawFn, document: Any, placeholder: str, raw: dict[str, str]) -> Any:
    """The document with one change; values that no dump would write are left to `raw`."""
    parent, key = _place(draw, document)
    action = draw(
        st.sampled_from(("hostile", "hostile", "hostile", "generated", "nearby", "remove", "rename", "double"))
    )
    if parent is None or action == "hostile":
        raw[placeholder] = draw(st.sampled_from(HOSTILE_JSON))
        value: Any = placeholder
    elif action == "generated":
        value = draw(json_values)
    elif action == "nearby":
        other, other_key = _place(draw, document)
        value = parent[key] if other is None else other[other_key]
        value = value + draw(st.integers(-3, 3)) if isinstance(value, int) else value
        value = json.loads(json.dumps(value))  # a copy: no cycles
    elif action == "remove":
        del parent[key]
        return document
    else:
        name = draw(
            st.sampled_from(("", "x", "\ud800", "a\nb", "a\0b", "__class__", CODE, "9" * 50)) | st.text(max_size=6)
        )
        if not isinstance(parent, dict):
            parent.append(parent[key])
        elif action == "rename":
            parent[name] = parent.pop(key)
        else:
            parent[name] = parent[key]
        return document
    if parent is None:
        return value
    parent[key] = value
    return document


def _place(draw: st.DrawFn, document: Any) -> tuple[Any, Any]:
    """A random (container, key) of the document; (None, None) for the document itself. Every depth is as likely."""
    parent, key = None, None
    node = document
    for _ in range(draw(st.integers(0, 6))):
        if isinstance(node, dict) and node:
            parent, key = node, draw(st.sampled_from(sorted(node)))
        elif isinstance(node, list) and node:
            parent, key = node, draw(st.integers(0, len(node) - 1))
        else:
            break
        node = parent[key]
    return parent, key


def json_lines(draw: st.DrawFn, content: bytes) -> bytes:
    lines = content.splitlines()
    index = draw(st.integers(0, len(lines) - 1))
    match draw(st.sampled_from(("change", "change", "change", "cut", "remove", "double", "insert", "swap"))):
        case "change":
            lines[index] = json_text(draw, lines[index])
        case "cut":
            lines[index] = lines[index][: draw(st.integers(0, 40))]
        case "remove":
            del lines[index]
        case "double":
            lines.insert(index, lines[index])
        case "insert":
            lines.insert(index, draw(st.sampled_from(HOSTILE_JSON)).encode())
        case "swap":
            lines[0], lines[index] = lines[index], lines[0]
    return b"\n".join(lines) + b"\n"


def safetensors(draw: st.DrawFn, content: bytes) -> bytes:
    """The header changed, its length right or wrong; the data as they were or cut."""
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    entry = header[draw(st.sampled_from(names))]
    match draw(st.sampled_from(("json", "json", "shape", "offsets", "overlap", "dtype", "length", "data"))):
        case "json":
            text = json_text(draw, json.dumps(header).encode())
            return struct.pack("<Q", len(text)) + text + data
        case "shape":
            entry["shape"] = draw(st.lists(st.sampled_from(HOSTILE_INTS), max_size=3))
        case "offsets":
            entry["data_offsets"] = draw(st.lists(st.sampled_from((*HOSTILE_INTS, len(data))), max_size=3))
        case "overlap":
            entry["data_offsets"] = header[draw(st.sampled_from(names))]["data_offsets"]
        case "dtype":
            entry["dtype"] = draw(
                st.sampled_from(("F64", "I8", "BOOL", "F8_E4M3", "C64", "F4", "U64", "", "f32", "BF16"))
            )
        case "data":
            data = data[: draw(st.integers(0, len(data)))]
        case "length":
            text = json.dumps(header).encode()
            wrong = draw(st.sampled_from((0, 1, len(text) - 1, len(text) + 1, 1 << 40, (1 << 64) - 1)))
            return struct.pack("<Q", wrong) + text + data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def protobuf(draw: st.DrawFn, content: bytes) -> bytes:
    """Fields put before a message of the wire format: long and endless numbers, long texts, lengths beyond the end."""
    number = draw(st.sampled_from((0, 1, 2, 3, 15, 1 << 29)))
    text = draw(
        st.sampled_from((b"", b"a", b"\xff", b"\xe2\x96\x81", b"ab" * 100_000, b"a" * 2_000_000))
        | st.binary(max_size=8)
    )
    piece = _field(1, 2, _number(len(text)) + text) + _field(2, 5, draw(st.binary(min_size=4, max_size=4)))
    field = draw(
        st.sampled_from((
            _field(1, 2, _number(len(piece)) + piece),
            _field(number, 2, _number(1 << 40)),
            _field(number, 0, b"\xff" * 9 + b"\1"),
            _field(number, 0, b"\xff" * 2_000_000 + b"\1"),
            _field(number, draw(st.integers(3, 7)), b""),
            _field(1, 0, b"\5"),
        ))
    )  # fmt: skip
    return field + content if draw(st.booleans()) else content + field


def _field(number: int, wire_type: int, value: bytes) -> bytes:
    return _number(number << 3 | wire_type) + value


def _number(value: int) -> bytes:
    low = bytes([value & 0x7F])
    return low if value < 0x80 else bytes([value & 0x7F | 0x80]) + _number(value >> 7)


def bddl(draw: st.DrawFn, content: bytes) -> bytes:
    """Words and whole groups replaced, doubled, left out or moved."""
    text = content.decode()
    words = re.findall(r"[()]|[^\s()]+|\s+", text)
    hostile = (
        "(", ")", "()", CODE_WORD, "1e400", "nan", "٣", "007", "1_000", "-", ":regions", ":language", "And",
        ";", "; \r", "\r", "\0", "\x1b[2J", "é", "(" * 50_000, "a" * 90_000, "\u2028", "0x10", "İ",
        f"(:regions (r (:target x) (:yaw_rotation (({CODE_WORD} 0)))))",
        f";\r(:regions (r (:target x) (:yaw_rotation (({CODE_WORD} 0))))) ;",
    )  # fmt: skip
    for _ in range(draw(st.integers(1, 3))):
        index = draw(st.integers(0, len(words) - 1))
        end = index + draw(st.integers(1, 40))
        match draw(st.sampled_from(("replace", "insert", "remove", "double", "move"))):
            case "replace":
                words[index] = draw(st.sampled_from(hostile))
            case "insert":
                words.insert(index, f" {draw(st.sampled_from(hostile))} ")
            case "remove":
                del words[index : draw(st.sampled_from((index + 1, end)))]
            case "double":
                words[index:index] = words[index:end]
            case "move":
                start = draw(st.integers(0, len(words) - 1))
                words[start:start] = words[index:end]
        if not words:
            break
    return "".join(words).encode("utf-8", "surrogatepass")
