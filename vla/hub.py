"""Find the folder of a checkpoint: a local path, the cache of the Hugging Face hub, or a download; upload one."""

import logging
import re
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.utils import filter_repo_objects

from contracts import BadInput, no_such_folder
from vla.weights import weight_files

log = logging.getLogger(__name__)

HUB_TIMEOUT_S = 10.0
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.pt", "tokenizer.model", "README.md"]  # no Python code


def resolve_checkpoint(name: str) -> Path:
    """The folder of a checkpoint: a local folder itself, or for a hub id the cached folder, downloaded if needed.

    Raises BadInput when there is none. Without a network it waits for at most HUB_TIMEOUT_S seconds.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not HUB_ID.fullmatch(name):
        raise BadInput(f"checkpoint {name}: {no_such_folder(name)}: give a folder, or a hub id (owner/name)")
    cached = _complete_snapshot(name)
    if cached is not None:
        _download_missing_files(name, cached)
        return cached
    announce_hub("checkpoint", name)
    try:
        # Ask with a timeout first, because snapshot_download waits forever on a network that drops packets.
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except PermissionError as error:
        raise BadInput(
            f"checkpoint {name}: {error.filename} may not be used: set HF_HOME to a folder of your own (a 7B is 15 GB)"
        ) from None
    except Exception as error:  # the hub library raises errors of several HTTP libraries
        raise BadInput(
            f"checkpoint {name}: {no_such_folder(name)}, not in the download cache, and the hub gave "
            f"{type(error).__name__}: check name and network, or give a local folder"
        ) from error


def announce_hub(kind: str, name: str | Path) -> None:
    """Log that the hub is asked, in case that a folder was meant and its name mistyped."""
    log.warning("%s %s: %s, so the Hugging Face hub is asked", kind, name, no_such_folder(name))


def commit_of(folder: Path) -> str | None:
    """The hub's commit that a folder of the download cache holds; None for other folders."""
    return folder.name if folder.parent.name == "snapshots" else None


def _complete_snapshot(name: str) -> Path | None:
    """The cached folder of a hub id if all its weight files are there, without using the network."""
    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
        is_complete = all(path.is_file() for path in weight_files(folder))
    except Exception:  # it is not cached, or the library knows that it is incomplete
        return None
    return folder if is_complete else None


def _download_missing_files(name: str, folder: Path) -> None:
    """Download the files of a cached snapshot that the hub lists and the cache lacks, if the hub can be reached.

    Nothing in the folder names its L1 head and proprio projector: without them the checkpoint would be another policy.
    """
    try:
        listed = HfApi().model_info(name, revision=folder.name, timeout=HUB_TIMEOUT_S).siblings or []
        wanted = filter_repo_objects([file.rfilename for file in listed], allow_patterns=_HUB_FILES)
        if not all((folder / file).is_file() for file in wanted):
            snapshot_download(name, revision=folder.name, allow_patterns=_HUB_FILES)
    except Exception as error:  # the hub library raises errors of several HTTP libraries
        log.info("%s: the cache is used as it is, because the hub gave %s", name, type(error).__name__)


def check_upload(repository: str) -> None:
    """Raise BadInput if `repository` is no OWNER/NAME, or if the hub does not know who uploads."""
    if not HUB_ID.fullmatch(repository):
        raise BadInput(f"--push-to-hub {repository}: expected OWNER/NAME")
    try:
        HfApi().whoami()
    except Exception as error:  # the hub library raises errors of several HTTP libraries
        raise BadInput(
            f"--push-to-hub {repository}: the hub gave {type(error).__name__}: check the network, and log in by "
            "`hf auth login`"
        ) from None


def upload(folder: Path, repository: str) -> str:
    """Upload a checkpoint's folder; a new repository is private. Returns its address. Raises BadInput."""
    try:
        address = HfApi().create_repo(repository, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:
        raise BadInput(
            f"--push-to-hub {repository}: the hub gave {type(error).__name__}; {folder} is complete: send it by "
            f"`hf upload {repository} {folder}`"
        ) from None
    return str(address)
