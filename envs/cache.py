"""The one folder outside a run folder that the simulator's side may write to."""

import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """Our cache folder, created: $VLA_GRPO_CACHE, else $XDG_CACHE_HOME/vla-grpo, else ~/.cache/vla-grpo.

    Falls back to a folder of this user under the system's temporary directory where that cannot be written
    (read-only home directories of clusters and containers).
    """
    wanted = os.environ.get("VLA_GRPO_CACHE")
    xdg = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    fallback = Path(tempfile.gettempdir()) / f"vla-grpo-{os.getuid()}"
    if _writable(folder := Path(wanted or Path(xdg) / "vla-grpo").absolute()):
        return folder
    if _writable(fallback) and fallback.stat().st_uid == os.getuid():  # in a shared /tmp the name may be taken
        return fallback
    return Path(tempfile.mkdtemp(prefix="vla-grpo-"))


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
