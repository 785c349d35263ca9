"""The folder for what is kept outside of runs: asset packs, compiled code, and what libraries would write elsewhere."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from contracts import BadInput

# Environment variable -> subfolder of our cache for what a library would otherwise write elsewhere.
LIBRARY_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "compiled",  # torch's compiler would choose a folder in /tmp
    "MPLCONFIGDIR": "matplotlib",  # LIBERO imports it, and it writes into the user's home
    "NUMBA_CACHE_DIR": "numba",  # robosuite would write into site-packages
    "MESA_SHADER_CACHE_DIR": "mesa",  # drivers write into the user's home
    "__GL_SHADER_DISK_CACHE_PATH": "nvidia",
}


def cache_dir() -> Path:
    """$VLA_GRPO_CACHE, else ~/.cache/vla-grpo, else a folder in /tmp. Raises BadInput if none can be written."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "vla-grpo")
    preferred = Path(os.environ.get("VLA_GRPO_CACHE") or home).absolute()
    if _is_writable(preferred):
        return preferred
    with reported_cache_errors(preferred):
        # gettempdir() raises OSError where nothing can be written, so it is called only now.
        temporary = Path(tempfile.gettempdir(), f"vla-grpo-{os.getuid()}")
        temporary.mkdir(mode=0o700, exist_ok=True)
        if temporary.stat().st_uid != os.getuid():
            raise PermissionError(0, f"and {temporary} belongs to another user")
    return temporary


def _is_writable(folder: Path) -> bool:
    """Whether a folder can be written, which is made first if it does not exist."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


@contextmanager
def reported_cache_errors(folder: Path) -> Iterator[None]:
    """Write to the cache folder `folder` in this block. Raises BadInput, which names it, in place of OSError."""
    try:
        yield
    except OSError as fault:
        raise BadInput(
            f"the cache folder {folder} cannot be written ({fault.strerror}): free disk space, or name another folder "
            "in the environment variable VLA_GRPO_CACHE"
        ) from fault


def choose_library_caches() -> None:
    """Have libraries keep what they compile in our cache folder, unless the user has chosen another folder.

    Call this before `vla`, matplotlib or the simulator is imported.
    """
    for variable, name in LIBRARY_CACHES.items():
        os.environ.setdefault(variable, str(cache_dir() / name))
