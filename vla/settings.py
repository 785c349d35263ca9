"""The settings of the command lines in `vla`; the field docstrings are the text of `--help`. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MergeArgs:
    """Merge a trained adapter into its base: a plain OpenVLA-OFT folder that other OFT programs load."""

    adapter: Path
    """Adapter folder, such as runs/RUN/checkpoints/best."""
    out: Path
    """Folder to write; must not exist."""
    base: str | None = None
    """Base checkpoint (None: the one that the adapter names)."""
    device: str = "auto"
    """Where the two policies are compared (auto: on a GPU if there is one); the merge itself needs no GPU."""
