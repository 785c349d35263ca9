"""Valid folders, damaged: the hypothesis strategy behind every input of the fuzzing.

A folder is a mapping from relative paths to entries. Most damage is to the bytes of one file, with or without knowledge
of its format (`formats.py`); some is to the folder itself: files missing, folders in their place, links, pipes.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from hypothesis import strategies as st

from tests.fuzzing import formats
from tests.fuzzing.archives import archive

HOLE_BYTES = 1 << 42  # of a sparse file: it takes no room on the disk, and nobody may try to read all of it


@dataclass(frozen=True)
class Link:
    target: str


@dataclass(frozen=True)
class Special:
    kind: str  # "folder", "pipe" or "hole"


Entry = bytes | Link | Special
Damage = Callable[[st.DrawFn, bytes], bytes]
PLACEHOLDERS = (
    b"",
    Special("folder"),
    Special("pipe"),
    Special("hole"),
    Link("itself"),
    Link("/nowhere/at/all"),
    Link("/dev/zero"),
    Link("/proc/self/mem"),
    Link("."),
)
BY_SUFFIX: dict[str, Damage] = {
    ".json": formats.json_text,
    ".jsonl": formats.json_lines,
    ".safetensors": formats.safetensors,
    ".pt": archive,
    ".npz": archive,
    ".pruned_init": archive,
    ".model": formats.protobuf,
    ".bddl": formats.bddl,
}


@st.composite
def damaged(draw: st.DrawFn, files: Mapping[str, Entry], hostile: Mapping[str, tuple[bytes, ...]]) -> dict[str, Entry]:
    """The folder with one, two or three of its files damaged. `hostile`: ready-made contents by suffix."""
    folder = dict(files)
    for _ in range(draw(st.sampled_from((1, 1, 1, 1, 2, 3)))):
        name = draw(st.sampled_from(sorted(files)))
        content = files[name]
        choice = draw(st.integers(0, 19))
        if choice == 0:
            folder.pop(name, None)
        elif choice == 1 or not isinstance(content, bytes):
            folder[name] = draw(st.sampled_from(PLACEHOLDERS))
        elif choice == 2:
            folder[name] = draw(st.binary(max_size=300) | st.text(max_size=100).map(lambda text: text.encode()))
        elif choice == 3:  # a valid file of another kind
            other = files[draw(st.sampled_from(sorted(files)))]
            folder[name] = other
        elif choice <= 5 and PurePath(name).suffix in hostile:
            folder[name] = draw(st.sampled_from(hostile[PurePath(name).suffix]))
        elif choice <= 13 and PurePath(name).suffix in BY_SUFFIX:
            folder[name] = BY_SUFFIX[PurePath(name).suffix](draw, content)
        else:
            folder[name] = formats.any_bytes(draw, content)
    return folder


def write_folder(folder: Path, entries: Mapping[str, Entry], unchanged: Mapping[str, Path]) -> None:
    """Put the entries on the disk. Files that are in `unchanged` are hard links to it: large ones are not copied."""
    folder.mkdir()
    for name, entry in entries.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in unchanged:
            path.hardlink_to(unchanged[name])
        elif isinstance(entry, bytes):
            path.write_bytes(entry)
        elif isinstance(entry, Link):
            path.symlink_to(path.name if entry.target == "itself" else entry.target)
        elif entry.kind == "folder":
            path.mkdir()
        elif entry.kind == "pipe":
            os.mkfifo(path)
        else:
            path.touch()
            os.truncate(path, HOLE_BYTES)


def read_folder(folder: Path) -> dict[str, Entry]:
    """The entries of a valid folder; empty folders are entries, links stay links."""
    entries: dict[str, Entry] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            entries[name] = Link(os.readlink(path))
        elif path.is_file():
            entries[name] = path.read_bytes()
        elif not any(path.iterdir()):
            entries[name] = Special("folder")
    return entries
