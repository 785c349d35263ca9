"""Find the folder of a checkpoint: a local path, the cache of the Hugging Face hub, or a download."""

import logging
import re
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from contracts import BadInput, first_line

log = logging.getLogger(__name__)

HUB_TIMEOUT_S = 10.0
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.pt", "tokenizer.model", "README.md"]  # no Python code


def check_checkpoint_name(checkpoint: str) -> None:
    """Raise BadInput if a checkpoint's name is neither a folder nor of the form of a hub id."""
    if not Path(checkpoint).expanduser().is_dir() and not HUB_ID.fullmatch(checkpoint):
        raise BadInput(f"checkpoint {checkpoint}: no such folder: give a folder, or a hub id (owner/name)")


def resolve_checkpoint(name: str) -> Path:
    """The folder of a checkpoint: a local folder itself, or for a hub id the cached folder, downloaded if needed.

    Raises BadInput when there is none.
    """
    check_checkpoint_name(name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    cached = _cached_snapshot(name)
    if cached is None:
        # In case that a folder was meant, and its name mistyped.
        log.warning("checkpoint %s: no such folder, so the Hugging Face hub is asked", name)
    revision = None if cached is None else cached.name
    try:
        # Ask with a timeout first, because snapshot_download waits forever on a network that drops packets.
        HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_S)
        # Of a cached snapshot only the files that it lacks: without its L1 head it would be another policy.
        return Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub library raises errors of several HTTP libraries
        if cached is not None:
            log.info("%s: the cache is used as it is, because the hub gave %s", name, type(error).__name__)
            if not any(cached.glob("action_head--*")):
                log.warning("%s: its cache has no L1 head: if the hub has one, this is another policy", name)
            return cached
        raise BadInput(
            f"checkpoint {name}: no such folder, and downloading it gave {type(error).__name__} "
            f"({first_line(error)}): check name, network and HF_HOME (a 7B is 15 GB), or give a local folder"
        ) from error


def commit_of(folder: Path) -> str | None:
    """The hub's commit that a folder of the download cache holds; None for other folders."""
    return folder.name if folder.parent.name == "snapshots" else None


def _cached_snapshot(name: str) -> Path | None:
    """The folder of a hub id in the download cache, which may lack files; None if there is none."""
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
