"""Where the models of LIBERO's objects and scenes (MJCF files, meshes, textures) come from: hf-libero ships none.

"lowpoly" (generated here; the physics is LIBERO's), "official" (LIBERO's own, cached or downloaded), or a folder.
"""

from pathlib import Path

from contracts import BadInput
from envs.tasks import cache_dir, libero_root

SUBFOLDERS = (
    "articulated_objects", "scenes", "stable_hope_objects", "stable_scanned_objects", "turbosquid_objects", "textures",
)  # fmt: skip


def find_assets(assets: str) -> Path:
    """Absolute asset folder for "lowpoly", "official" or a directory. Raises BadInput where there is none."""
    if assets == "lowpoly":
        from workshop.lowpoly import ensure_pack

        return ensure_pack(cache_dir())
    folder = _official() if assets == "official" else Path(assets).absolute()
    if missing := [name for name in SUBFOLDERS if not (folder / name).is_dir()]:
        found = f"lacks {', '.join(missing)}" if folder.is_dir() else "does not exist"
        raise BadInput(f'{folder} is no LIBERO asset folder: it {found}; use "lowpoly" for the bundled models')
    return folder


def describe_assets(assets: str) -> str:
    """One phrase for logs and run records: which pictures the policy saw."""
    if assets == "lowpoly":
        return "bundled low-poly models (LIBERO's physics, simplified looks)"
    return f"{'official LIBERO meshes' if assets == 'official' else 'folder'} {find_assets(assets)}"


def _official() -> Path:
    """hf-libero's folders, else the hub's."""
    cached = Path("~/.cache/libero/assets").expanduser()  # where hf-libero's downloader puts them
    for folder in (libero_root() / "assets", cached):
        if (folder / "scenes").exists():
            return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repo_id="lerobot/libero-assets", repo_type="dataset"))
    except Exception as fault:  # no network, no package, no space
        reason = f"neither in {cached} nor can they be downloaded ({type(fault).__name__})"
        raise BadInput(f"official LIBERO assets are {reason}; use lowpoly or a folder that holds them") from None
