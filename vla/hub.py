"""A checkpoint's name -> a local folder: a folder as it is, or a Hugging Face hub id."""

import os
import re
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

from errors import BadInput
from vla.weights import weight_files

REACH_TIMEOUT_S = 10.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Weights, tokenizer, processor, statistics and heads; no Python code.
_FILES = ["*.json", "*.safetensors", "*.pt", "tokenizer.model"]


def resolve_checkpoint(name: str) -> Path:
    """A local path is taken as it is, without any network. A hub id is taken from the cache, or downloaded.

    Downloads resume where they stopped. Raises BadInput within seconds when the hub cannot be reached.
    """
    folder = os.path.expanduser(name)
    if os.path.isdir(folder):  # unlike Path's methods False, too, for what cannot be a name
        return Path(folder)
    if not _HUB_ID.fullmatch(name):
        raise BadInput(f"checkpoint {name}: no such folder: give a checkpoint folder or a hub id (owner/name)")
    cached = _cached(name)
    if cached is not None:
        return cached
    try:
        # Asked with a timeout first: snapshot_download waits forever where a network swallows packets.
        HfApi().model_info(name, timeout=REACH_TIMEOUT_S)
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:  # the hub library lets errors of several HTTP libraries through
        raise BadInput(
            f"checkpoint {name}: no such folder here, not in the download cache, and the hub gave "
            f"{type(error).__name__}: check the name and the network, or give a local folder"
        ) from error


def _cached(name: str) -> Path | None:
    """The complete snapshot in the cache, if there is one."""
    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
    except Exception:  # not cached, or known to the library to be incomplete
        return None
    return folder if all(path.is_file() for path in weight_files(folder)) else None
