"""Hold and check an episode as another program stored it. lerobot.py and rlds.py read such episodes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from contracts import BadInput
from workshop.demo_files import LIBERO_SIZES

AGENTVIEW_NAMES = ("image", "agentview", "agentview_image", "agentview_rgb")
WRIST_NAME = re.compile(r"wrist|hand|^image_?2$")
NOOP_NORM = 1e-4  # an action moves the arm if the norm of its six motions is at least this
FINGER_LIMIT_M = 0.06  # a finger of LIBERO's robot moves from 0 to 0.04 m, and a little beyond both ends


@dataclass(frozen=True)
class StoredEpisode:
    """An episode of T env steps: images and robot state before each step, and the action that followed."""

    location: str  # for messages: the file or folder, and the number of the episode
    # [T][cameras], agentview before wrist: bytes of an image file, or uint8 (H, W, 3). Empty if images were not read.
    pictures: Sequence[Sequence[bytes | np.ndarray]]
    proprio: np.ndarray  # (T, 8) float32, as in DemoEpisode
    actions: np.ndarray  # (T, 7) float32; the gripper's column has two values
    instruction: str


def choose_cameras(names: Sequence[str], location: str) -> list[str]:
    """Find the cameras among the names of image features: returns agentview's, then the wrist's if there is one.

    Raises BadInput if it is unclear which name is which camera's.
    """
    short_names = {name: re.split(r"[./]", name)[-1] for name in names}
    wrist = [name for name in names if WRIST_NAME.search(short_names[name])]
    not_wrist = [name for name in names if name not in wrist]
    agentview = [name for name in not_wrist if short_names[name] in AGENTVIEW_NAMES]
    if not agentview:
        agentview = not_wrist
    if len(agentview) != 1 or len(wrist) > 1:
        raise BadInput(
            f"{location}: cameras {', '.join(names) or 'none'}: it is unclear which is agentview and which the "
            "wrist's: name them image and wrist_image"
        )
    return agentview + wrist


def check_contents(episode: StoredEpisode) -> None:
    """Raise BadInput for states and actions that cannot be those of LIBERO's robot and env."""
    action_dim, proprio_dim = LIBERO_SIZES
    state_meaning = f"{proprio_dim} values (hand position 3, axis-angle 3, finger joints 2)"
    _check_array(episode, "states", episode.proprio, proprio_dim, state_meaning)
    _check_array(
        episode, "actions", episode.actions, action_dim, f"{action_dim} values (motions 6, gripper 1)"
    )
    largest_motion = np.abs(episode.actions[:, :6]).max()
    if largest_motion > 1:
        raise BadInput(
            f"{episode.location}: a motion of {largest_motion:.4g}, beyond [-1, 1]: expected relative actions as "
            "LIBERO's env takes them, not absolute ones, and not metres: convert the dataset"
        )
    fingers = episode.proprio[:, 6:]
    is_too_far = np.abs(fingers).max() > FINGER_LIMIT_M
    is_swapped = fingers[:, 0].mean() < fingers[:, 1].mean()
    if is_too_far or is_swapped:
        raise BadInput(
            f"{episode.location}: values 7 and 8 of the state lie in [{fingers.min():.3g}, {fingers.max():.3g}], so "
            "they are no finger joints: expected 0 to 0.04 m and -0.04 to 0 m, in this order and not normalised"
        )
    if not episode.instruction.strip():
        raise BadInput(f"{episode.location}: no instruction: give the task its text")


def _check_array(episode: StoredEpisode, name: str, values: np.ndarray, width: int, expected: str) -> None:
    """Raise BadInput unless `values` is finite and has one row of `width` numbers for each env step."""
    if values.shape != (len(episode.actions), width):
        raise BadInput(
            f"{episode.location}: {name} of shape {values.shape[1:]}, expected {expected}: convert the dataset"
        )
    if not np.isfinite(values).all():
        raise BadInput(f"{episode.location}: {name} that are not finite: repair or remove this episode")


def moving_steps(actions: np.ndarray) -> np.ndarray:
    """Indices of the env steps in which something moves, int64 (K,). actions: (T, 7).

    All other steps are no-ops: the arm does not move, and the gripper's command is that of the last kept step. Before
    the first kept step only motion of the arm counts.
    Source: openvla, experiments/robot/libero/regenerate_libero_dataset.py.
    """
    arm_moves = np.linalg.norm(actions[:, :6], axis=1) >= NOOP_NORM
    gripper = actions[:, 6]
    kept: list[int] = []
    for step in range(len(actions)):
        gripper_changes = len(kept) > 0 and gripper[step] != gripper[kept[-1]]
        if arm_moves[step] or gripper_changes:
            kept.append(step)
    return np.array(kept, np.int64)
