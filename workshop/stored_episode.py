"""Hold and check an episode as another program stored it. lerobot.py and rlds.py read such episodes."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from contracts import BadInput

# Names of the pictures: of lerobot/libero, of openpi's conversion, and of RLDS data.
AGENTVIEW = ("observation.images.image", "image", "steps/observation/image")
WRIST = (
    "observation.images.image2",
    "observation.images.wrist_image",
    "wrist_image",
    "steps/observation/wrist_image",
)
NOOP_NORM = 1e-4  # an action moves the arm if the norm of its six motions is at least this
FINGER_LIMIT_M = 0.06  # a finger of LIBERO's robot moves from 0 to 0.04 m, and a little beyond both ends
FINGER_STEPS = 5  # after so many env steps of one gripper command the fingers show its effect
LEAST_FINGER_MOTION_M = 1e-4  # the mean motions after the two commands must differ by at least so much
# The axis-angle of a hand that points down is about pi long; an env step turns it by 0.15. Euler angles jump by 2 pi.
LARGEST_TURN = np.pi
# LIBERO's hand moves some 0.012 m in an env step by an action of 1, and never more than the controller's goal.
LARGEST_MOVE_M = 0.05
CLEAR_CORRELATION = 0.5
GRIPPER_VALUES = ({-1.0, 1.0}, {0.0, 1.0})


@dataclass(frozen=True)
class StoredEpisode:
    """An episode of T env steps: images and robot state before each step, and the action that followed."""

    location: str  # for messages: the file or folder, and the number of the episode
    # [T][cameras], agentview before wrist: bytes of an image file, or uint8 (H, W, 3). Empty if images were not read.
    pictures: Sequence[Sequence[bytes | np.ndarray]]
    proprio: np.ndarray  # (T, 8) float32, as in DemoEpisode
    actions: np.ndarray  # (T, 7) float32; the gripper's column has two values
    instruction: str
    success: bool | None  # None: the data do not say


def only_instruction(instructions: Iterable[str], location: str) -> str:
    """The instruction of all env steps of an episode. Raises BadInput if it changes."""
    different = sorted(set(instructions))
    if len(different) != 1:
        raise BadInput(
            f"{location}: its instruction changes ({'; '.join(different)}): make an episode of each instruction"
        )
    return different[0]


def choose_feature(features: Collection[str], names: Sequence[str], location: str) -> str:
    """The first of `names` among a dataset's features. Raises BadInput if it has none of them."""
    for name in names:
        if name in features:
            return name
    raise BadInput(
        f"{location}: no {' or '.join(names)} among its features ({', '.join(features)}): rename one of them"
    )


def choose_cameras(features: Collection[str], location: str) -> list[str]:
    """The features with pictures: agentview's, then the wrist's if there is one. Raises BadInput without agentview."""
    wrist_cameras = [name for name in WRIST if name in features]
    return [choose_feature(features, AGENTVIEW, location), *wrist_cameras[:1]]


def check_contents(episode: StoredEpisode) -> None:
    """Raise BadInput for states and actions that cannot be those of LIBERO's robot and env."""
    problem = _problem_of(episode.proprio, episode.actions)
    if problem is not None:
        raise BadInput(f"{episode.location}: {problem}: convert the dataset")


def _problem_of(proprio: np.ndarray, actions: np.ndarray) -> str | None:
    """The first thing that is wrong with states and actions, and what was expected; None if nothing is."""
    if proprio.shape != (len(actions), 8):
        return f"states of shape {proprio.shape[1:]}, expected hand position 3, axis-angle 3, finger joints 2"
    if actions.shape[1:] != (7,):
        return f"actions of shape {actions.shape[1:]}, expected motions 6, gripper 1"
    if not (np.isfinite(proprio).all() and np.isfinite(actions).all()):
        return "states or actions that are not finite"
    largest_motion = np.abs(actions[:, :6]).max()
    if largest_motion > 1:
        return f"a motion of {largest_motion:.4g}, expected relative actions in [-1, 1], as LIBERO's env takes them"
    gripper = set(actions[:, 6].tolist())
    if not any(gripper <= values for values in GRIPPER_VALUES):
        values = ", ".join(f"{value:g}" for value in sorted(gripper)[:5])
        return f"the gripper's actions are {values}; expected -1 and 1, or 0 and 1"
    fingers = proprio[:, 6:]
    if np.abs(fingers).max() > FINGER_LIMIT_M or fingers[:, 0].mean() < fingers[:, 1].mean():
        return (
            f"values 7 and 8 of the state lie in [{fingers.min():.3g}, {fingers.max():.3g}], so they are no finger "
            "joints: expected 0 to 0.04 m and -0.04 to 0 m, not normalised"
        )
    moves = np.diff(proprio[:, :3], axis=0)
    told = actions[:-1, :3]
    product = float((moves * told).sum())
    correlation = product / max(np.linalg.norm(moves) * np.linalg.norm(told), 1e-9)
    move_by_one = product / max(np.square(told).sum(), 1e-9)
    if abs(correlation) > CLEAR_CORRELATION and not 0 < move_by_one < LARGEST_MOVE_M:
        return (
            f"by an action of 1 the hand moves {move_by_one:.2g} m in an env step, LIBERO's about 0.012 m: expected "
            "actions as LIBERO's env takes them"
        )
    turns = np.linalg.norm(np.diff(proprio[:, 3:6], axis=0), axis=1)
    if len(turns) and turns.max() > LARGEST_TURN:
        return (
            f"the orientation (values 4 to 6 of the state) jumps by {turns.max():.2g} rad in one env step, so it is no "
            "axis-angle as LIBERO's: Euler angles do so"
        )
    return None


def positive_closes(episode: StoredEpisode) -> bool | None:
    """Whether the gripper's positive command closes it; None if the fingers' motion does not show it."""
    is_positive = episode.actions[:, 6] > 0
    distance = episode.proprio[:, 6] - episode.proprio[:, 7]
    changes = distance[FINGER_STEPS:] - distance[:-FINGER_STEPS]
    commands = sliding_window_view(is_positive, FINGER_STEPS)[: len(changes)]  # during each change
    after_positive = changes[commands.all(axis=1)]
    after_other = changes[~commands.any(axis=1)]
    if len(after_positive) == 0 or len(after_other) == 0:
        return None
    difference = after_positive.mean() - after_other.mean()
    return None if abs(difference) < LEAST_FINGER_MOTION_M else bool(difference < 0)


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
