"""Save an unfinished supervised training at intervals, so that the same command goes on with it after a kill."""

import contextlib
import io
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from typing_extensions import NotRequired, TypedDict

from contracts import BadInput, first_line
from json_fields import read_fields
from rl.update import Learner

SFT_RUN_FILE = "sft_run.json"
STATE_FILE = "sft_training.pt"
SAVE_EVERY_S = 300.0  # at most so much training is lost


class StoredRun(TypedDict):
    """The fields of sft_run.json that are read."""

    arguments: dict[str, object]
    steps: NotRequired[int]  # missing before the checkpoint is written


@dataclass
class Progress:
    """What a training has reached, apart from weights, optimizer and random numbers."""

    num_frames: int  # of the demonstrations
    steps: int = 0
    seconds: float = 0.0
    records: list[dict[str, float]] = field(default_factory=list)  # the lines of sft_metrics.jsonl
    unrecorded: list[list[float]] = field(default_factory=list)  # metrics of the steps since the last record


def check_output_folder(out: Path, arguments: dict[str, object]) -> None:
    """Raise BadInput if `out` exists and holds anything but an unfinished training with the same arguments."""
    if not out.exists():
        return
    path = out / SFT_RUN_FILE
    if not path.exists():
        raise BadInput(f"--out {out} exists already: name a new folder")
    run = read_fields(path, StoredRun)
    if "steps" in run and not (out / STATE_FILE).exists():
        raise BadInput(f"--out {out} exists already, with a finished training: name a new folder")
    differing = [
        name for name in arguments if name != "out" and run["arguments"].get(name) != arguments[name]
    ]
    if differing:
        raise BadInput(
            f"--out {out} holds an unfinished training with other values of {', '.join(differing)}: give its own, or "
            "name a new folder"
        )


def begin_or_go_on(out: Path, learner: Learner, generator: torch.Generator, num_frames: int) -> Progress:
    """Restore what is stored in `out`, or begin anew. Saving the beginning shows whether there is space for it."""
    path = out / STATE_FILE
    if not path.exists():
        progress = Progress(num_frames)
        save_progress(out, learner, generator, progress)
        return progress
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        progress = Progress(**stored["progress"])
        with torch.no_grad():
            for name, parameter in learner.policy.named_trainable_parameters():
                parameter.copy_(stored["parameters"][name])
        # Clear the optimizer's old moments first: a full GPU has no room for the old and the new ones together.
        learner.optimizer.state.clear()
        learner.optimizer.load_state_dict(stored["optimizer"])
        generator.set_state(stored["generator"])
    except Exception as error:  # a damaged file can raise nearly any exception in torch
        raise BadInput(f"{path} cannot be read ({first_line(error)}): delete {out} to begin anew") from error
    if progress.num_frames != num_frames:
        raise BadInput(
            f"--demos has {num_frames} frames for training, but {out} was begun with {progress.num_frames}: name a new "
            "--out"
        )
    print(f"going on after step {progress.steps}", flush=True)
    return progress


def save_progress(out: Path, learner: Learner, generator: torch.Generator, progress: Progress) -> None:
    """Write the training's state in place of the one before. Raises OSError, and then keeps the one before."""
    parameters = {name: tensor.detach() for name, tensor in learner.policy.named_trainable_parameters()}
    # torch saves into memory first, because its own file writer does not say why a file cannot be written.
    in_memory = io.BytesIO()
    torch.save(
        {
            "progress": asdict(progress),
            "parameters": parameters,
            "optimizer": learner.optimizer.state_dict(),
            "generator": generator.get_state(),
        },
        in_memory,
    )
    draft = out / f"{STATE_FILE}.tmp"
    try:
        with draft.open("wb") as file:
            file.write(in_memory.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, out / STATE_FILE)
    finally:
        draft.unlink(missing_ok=True)


def remove_progress(out: Path) -> None:
    """Remove the state of a training that is finished, and what a kill has left of it."""
    for path in out.glob(f"{STATE_FILE}*"):
        path.unlink()


@contextlib.contextmanager
def tolerate_full_disk(path: Path) -> Iterator[None]:
    """Print a line if this block cannot write the file `path`. It is written again later."""
    try:
        yield
    except OSError as error:
        print(f"{path} could not be written ({error.strerror}); training goes on", flush=True)
