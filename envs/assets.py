"""Where the models of LIBERO's objects and scenes (MJCF files, meshes, textures) come from.

hf-libero ships none. Three sources, and the choice changes what the cameras see but, for "lowpoly", not the physics:
"lowpoly" (default, generated here, no download), "official" (LIBERO's own, by hf-libero's cache or download), or a
folder. The environment variable LIBERO_ASSETS names a folder where the recipe says "lowpoly", the default.
"""

import os
from pathlib import Path

from envs.cache import cache_dir
from errors import BadInput

SUBFOLDERS = (
    "articulated_objects",
    "scenes",
    "stable_hope_objects",
    "stable_scanned_objects",
    "turbosquid_objects",
    "textures",
)


def find_assets(assets: str) -> Path:
    """Absolute asset folder for "lowpoly", "official" or a directory. Raises BadInput where there is none."""
    if assets == "lowpoly" and (folder := os.environ.get("LIBERO_ASSETS")):
        return _checked(Path(folder), "LIBERO_ASSETS")
    if assets == "lowpoly":
        from workshop.lowpoly import ensure_pack

        return ensure_pack(cache_dir())
    if assets == "official":
        return _official()
    return _checked(Path(assets), "assets")


def describe_assets(assets: str) -> str:
    """One phrase for logs and run records: which pictures the policy saw."""
    if assets == "official":
        return f"official LIBERO meshes ({find_assets(assets)})"
    if is_lowpoly(assets):
        return "bundled low-poly models (LIBERO's physics, simplified looks)"
    return f"folder {find_assets(assets)}"


def is_lowpoly(assets: str) -> bool:
    """Whether objects look simpler than in LIBERO's own pictures."""
    return assets == "lowpoly" and not os.environ.get("LIBERO_ASSETS")


def _checked(folder: Path, source: str) -> Path:
    missing = [name for name in SUBFOLDERS if not (folder / name).is_dir()]
    if missing:
        found = f"lacks {', '.join(missing)}" if folder.is_dir() else "does not exist"
        raise BadInput(
            f'{source}: {folder} is no LIBERO asset folder: it {found}; use "lowpoly" for the bundled models'
        )
    return folder.absolute()


def _official() -> Path:
    """hf-libero's cache, else its download, as a folder that `_checked` has seen."""
    from envs.tasks import libero_root

    in_package = libero_root() / "assets"
    cached = Path(os.path.expanduser("~/.cache/libero/assets"))  # where hf-libero's downloader puts them
    for folder in (in_package, cached):
        if all((folder / name).is_dir() for name in SUBFOLDERS):
            return folder
    target = cache_dir() / "official_assets"
    try:
        if not (target / ".complete").exists():
            from huggingface_hub import snapshot_download

            snapshot_download(repo_id="lerobot/libero-assets", repo_type="dataset", local_dir=target)
            (target / ".complete").touch()
    except Exception as fault:
        raise BadInput(
            f"official LIBERO assets are neither in {cached} nor can they be downloaded ({type(fault).__name__}); "
            'with a network connection try again, or use "lowpoly" or a directory that holds them'
        ) from None
    return _checked(target, "official assets")
