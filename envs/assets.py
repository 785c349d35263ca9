"""Where the models of LIBERO's objects and scenes (MJCF files, meshes, textures) come from: hf-libero ships none.

The choice changes what the cameras see but, for "lowpoly", not the physics: "lowpoly" (generated here, no download),
"official" (LIBERO's own, by hf-libero's cache or download), or a folder. The environment variable LIBERO_ASSETS names a
folder where the recipe says "lowpoly", the default.
"""

import os
from pathlib import Path

from contracts import BadInput
from envs.tasks import cache_dir, libero_root

SUBFOLDERS = (
    "articulated_objects", "scenes", "stable_hope_objects", "stable_scanned_objects", "turbosquid_objects", "textures",
)  # fmt: skip


def find_assets(assets: str) -> Path:
    """Absolute asset folder for "lowpoly", "official" or a directory. Raises BadInput where there is none."""
    if is_lowpoly(assets):
        from workshop.lowpoly import ensure_pack

        return ensure_pack(cache_dir())
    folder = (
        _official()
        if assets == "official"
        else Path(os.environ["LIBERO_ASSETS"] if assets == "lowpoly" else assets).absolute()
    )
    if missing := [name for name in SUBFOLDERS if not (folder / name).is_dir()]:
        found = f"lacks {', '.join(missing)}" if folder.is_dir() else "does not exist"
        raise BadInput(f'{folder} is no LIBERO asset folder: it {found}; use "lowpoly" for the bundled models')
    return folder


def describe_assets(assets: str) -> str:
    """One phrase for logs and run records: which pictures the policy saw."""
    if is_lowpoly(assets):
        return "bundled low-poly models (LIBERO's physics, simplified looks)"
    return f"{'official LIBERO meshes' if assets == 'official' else 'folder'} {find_assets(assets)}"


def is_lowpoly(assets: str) -> bool:
    """Whether objects look simpler than in LIBERO's own pictures."""
    return assets == "lowpoly" and not os.environ.get("LIBERO_ASSETS")


def _official() -> Path:
    """hf-libero's folders, else our download."""
    cached = Path("~/.cache/libero/assets").expanduser()  # where hf-libero's downloader puts them
    downloaded = cache_dir() / "official_assets"
    for folder, whole in ((libero_root() / "assets", "scenes"), (cached, "scenes"), (downloaded, ".complete")):
        if (folder / whole).exists():
            return folder
    try:
        from huggingface_hub import snapshot_download

        snapshot_download(repo_id="lerobot/libero-assets", repo_type="dataset", local_dir=downloaded)
        (downloaded / ".complete").touch()
    except Exception as fault:  # no network, no package, no space
        reason = f"neither in {cached} nor can they be downloaded ({type(fault).__name__})"
        raise BadInput(f"official LIBERO assets are {reason}; use lowpoly or a folder that holds them") from None
    return downloaded
