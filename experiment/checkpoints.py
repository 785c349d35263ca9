"""Save and load training checkpoints. A kill at any moment leaves the previous checkpoint whole.

A run's folder checkpoints/ holds folders step_N (N env steps) and two pointers, `latest` and `best`: text files that
contain the name of such a folder. During a warmup in which the student acts, it also holds the folder lessons/ with a
file for each rollout, because all together would be gigabytes in every checkpoint.
"""

import io
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from contracts import BadInput, first_line, flush, replaced, resolve_pointer
from rl.lessons import from_tensors, to_tensors
from rl.rollout import Rollout
from rl.training_episodes import UNKNOWN
from rl.update import Learner

TRAINER_FILE = "trainer.pt"
LATEST = "latest"
BEST = "best"
LESSONS = "lessons"
UNFINISHED = ".writing"

TASK_ALPHA = 0.9  # weight of the old value in a task's exponential average, per episode


@dataclass
class TrainerState:
    """The state of a run, apart from the policy's weights, the optimizer and the critic."""

    global_step: int = 0  # env steps of training rollouts
    updates_done: int = 0
    metrics_bytes: int = 0  # length of metrics.jsonl when this state was saved
    evaluated_at: int | None = None  # global_step of the last evaluation
    # Successes and episodes of the teacher, which never changes and so is evaluated once.
    teacher: tuple[int, int] | None = None
    best_rate: float | None = None  # highest success rate of the greedy student in any evaluation
    task_success: dict[int, float] = field(default_factory=dict)  # curriculum: exponential average per task
    # Mean env steps of the last rollout's episodes, by which epsilon falls in the next one. Before the first rollout it
    # is a guess.
    episode_length: float = 150.0
    drawn: dict[int, int] = field(default_factory=dict)  # groups drawn so far, per task: see TrainingEpisodes
    wandb_id: str | None = None
    ranks: int = 1  # number of processes that train together; the episodes depend on it
    looks: str = ""  # name of the looks that the run trains on: see CheckpointInfo
    updates_without_signal: int = 0  # number of latest updates in a row that took no step

    def count_update(self, rollout: Rollout, steps_taken: int) -> None:
        """Add an update: its env steps, successes, drawn groups, and whether it took any optimizer step."""
        self.global_step += rollout.env_steps
        self.episode_length = rollout.env_steps / len(rollout.trajectories)
        self.updates_done += 1
        self.updates_without_signal = 0 if steps_taken else self.updates_without_signal + 1
        for trajectory in rollout.trajectories:
            episode = trajectory.episode
            success = float(trajectory.success)
            task_average = self.task_success.get(episode.task_id, UNKNOWN)
            self.task_success[episode.task_id] = TASK_ALPHA * task_average + (1 - TASK_ALPHA) * success
            # Trajectories are in the order of their episodes, so the value of the last one of a task remains.
            self.drawn[episode.task_id] = episode.group_of_task + 1


def save_checkpoint(checkpoints: Path, learner: Learner, state: TrainerState, keep: int) -> Path:
    """Save the checkpoint `checkpoints/step_N`, move the pointer `latest` to it and delete all but the newest `keep`.

    Every rank calls this; rank 0 writes and the others wait. Raises OSError (disk full, folder gone) and then leaves
    the previous checkpoint untouched.
    """
    folder = checkpoints / f"step_{state.global_step}"
    if learner.ranks.is_main:
        if learner.lessons:  # the others were written after the updates before
            last = len(learner.lessons) - 1
            (checkpoints / LESSONS).mkdir(exist_ok=True)
            write_trainer_state(lesson_path(checkpoints, last), to_tensors(learner.lessons[last]))
        _write_atomically(folder, learner, state)
        write_pointer(checkpoints / LATEST, folder)
        if not learner.lessons:
            shutil.rmtree(checkpoints / LESSONS, ignore_errors=True)
        _remove_old(checkpoints, keep)
    learner.ranks.gather(None)  # all ranks wait until it is written
    return folder


def _write_atomically(folder: Path, learner: Learner, state: TrainerState) -> None:
    """Write the checkpoint under a temporary name, flush it to the disk, and rename it to `folder`."""
    temporary = folder.with_name(UNFINISHED)
    shutil.rmtree(temporary, ignore_errors=True)  # a killed process has left it
    temporary.mkdir()  # raises OSError if the run folder was moved away
    try:
        learner.policy.save_adapter(temporary, looks=state.looks)
        save_state(temporary, learner, state)
        for path in (*temporary.rglob("*"), temporary):
            flush(path)
        # A kill between rename and pointer leaves this folder, which the resumed run writes again.
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    flush(folder.parent)


def save_state(folder: Path, learner: Learner, state: TrainerState) -> None:
    """Write the trainer's file of a checkpoint, or replace it: an evaluation has changed the state. Raises OSError."""
    contents: dict[str, object] = {"state": asdict(state), "optimizer": learner.optimizer.state_dict()}
    contents["lessons"] = len(learner.lessons)
    if learner.critic is not None:
        contents["critic"] = vars(learner.critic)
    write_trainer_state(folder / TRAINER_FILE, contents)


def lesson_path(checkpoints: Path, index: int) -> Path:
    """The file of the warmup's rollout number `index`, counted from 0."""
    return checkpoints / LESSONS / f"rollout_{index}.pt"


def write_trainer_state(path: Path, contents: dict[str, object]) -> None:
    """Write tensors and plain values, as torch.load reads them, in place of an older file. Raises OSError."""
    # torch saves into memory first, because its own file writer does not say why a file cannot be written.
    in_memory = io.BytesIO()
    torch.save(contents, in_memory)
    with replaced(path) as draft:
        draft.write_bytes(in_memory.getbuffer())
    flush(path.parent)


def _remove_old(checkpoints: Path, keep: int) -> None:
    """Delete all checkpoints except the `keep` that were written last, and those that the pointers name."""
    used = {resolve_pointer(checkpoints / BEST), resolve_pointer(checkpoints / LATEST)}
    folders = sorted(checkpoints.glob("step_*"), key=lambda folder: folder.stat().st_mtime_ns)
    for folder in folders[:-keep]:
        if folder not in used:
            shutil.rmtree(folder, ignore_errors=True)


def load_checkpoint(folder: Path, learner: Learner) -> TrainerState:
    """Restore the learner from a checkpoint and return the run's state.

    Random generators need no restoring: see rl/randomness.py. Raises BadInput if the folder is not a usable checkpoint,
    or if another number of ranks wrote it.
    """
    path = folder / TRAINER_FILE
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        state = TrainerState(**stored["state"])
        learner.policy.load_adapter(folder)
        if learner.critic is not None:
            learner.critic.episodes = stored["critic"]["episodes"]
            learner.critic.trust = stored["critic"]["trust"]
        if stored["lessons"] and not (folder.parent / LESSONS).is_dir():
            raise BadInput("its warmup has ended, and the rollouts needed to go on with that were deleted")
        for index in range(stored["lessons"]):
            lesson = torch.load(lesson_path(folder.parent, index), map_location="cpu", weights_only=True)
            learner.lessons.append(from_tensors(lesson))
        # Clear the optimizer's old moments first: a full GPU has no room for the old and the new ones together.
        learner.optimizer.state.clear()
        learner.optimizer.load_state_dict(stored["optimizer"])
    except Exception as error:  # a damaged file can raise nearly any exception in torch
        raise BadInput(
            f"{path} is not a usable checkpoint ({first_line(error)}): to use another one, write its name "
            f"(step_N) into {folder.parent / LATEST}"
        ) from error
    if state.ranks != learner.ranks.size:  # another number of ranks would play other episodes
        raise BadInput(
            f"the run trains in {state.ranks} process(es), one for each GPU, but was resumed with "
            f"{learner.ranks.size}: resume it with {state.ranks}"
        )
    return state


def latest_checkpoint(run_folder: Path) -> Path:
    """The folder that `checkpoints/latest` names. Raises BadInput if the pointer or the folder is missing."""
    pointer = run_folder / "checkpoints" / LATEST
    folder = resolve_pointer(pointer)
    if not folder.is_dir():
        names = ", ".join(sorted(path.name for path in pointer.parent.glob("step_*")))
        raise BadInput(
            f"--resume {run_folder}: no checkpoint at {pointer} ({folder.name}); found: {names or 'none'}"
        )
    return folder


def write_pointer(pointer: Path, target: Path) -> None:
    """Let the pointer name `target`, a folder beside it, and flush it to the disk. Raises OSError."""
    with replaced(pointer) as draft:
        draft.write_text(f"{target.name}\n")
    flush(pointer.parent)
