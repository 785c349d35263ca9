"""Statistics of a checkpoint's training data, and the scaling of actions and robot states by them.

Source of the formulas: openvla-oft @213c5ff, prismatic/vla/data_utils.py, modeling_prismatic.py in prismatic, and
openvla_utils.py in experiments/robot.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import GetPydanticSchema

from contracts import BadInput, read_fields

STATISTICS_FILE = "dataset_statistics.json"
# openvla-oft adds this to every range q99 - q01, so that it can be divided by even where a dimension never moved.
RANGE_EPSILON = 1e-8
TWO_ARMS_DIM = 14  # numbers in an action, and in the state, of a robot with two arms
SUITE_NAME = re.compile(r"libero_(?:spatial|object|goal|10|90)")


# Arrays, which are lists in files
_Numbers = Annotated[np.ndarray, GetPydanticSchema(lambda _, schema_of: schema_of(list[float]))]
_Mask = Annotated[np.ndarray, GetPydanticSchema(lambda _, schema_of: schema_of(list[bool]))]


@dataclass(eq=False)
class VectorStatistics:
    """Statistics of one vector, action or proprio. Arrays are (D,) float64.

    Normalising maps `bounds` to -1 and +1.
    """

    min: _Numbers
    max: _Numbers
    q01: _Numbers
    q99: _Numbers
    # (D,) bool; dimensions where it is False are not scaled. A single True, the default, stands for all dimensions.
    mask: _Mask = field(default_factory=lambda: np.array(True))

    def __post_init__(self) -> None:
        for name in ("min", "max", "q01", "q99", "mask"):
            setattr(self, name, np.array(getattr(self, name)))
        if self.mask.ndim == 0:
            self.mask = np.full(self.dim, self.mask)
        shapes = {array.shape for array in (self.min, self.max, self.q01, self.q99, self.mask)}
        if len(shapes) > 1:  # `read_fields` makes it a BadInput
            raise ValueError("minimum, maximum, quantiles and mask have several lengths")
        if np.any(self.min > self.max) or np.any(self.q01 > self.q99):
            raise ValueError("a lower bound is above its upper one")
        if not np.isfinite([self.min, self.max, self.q01, self.q99]).all():
            raise ValueError("a minimum, maximum or quantile is not a finite number")

    @property
    def dim(self) -> int:
        return len(self.min)

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The 1st and 99th percentile; in openvla-oft, for robots with two arms (ALOHA, RoboTwin) the extremes."""
        return (self.min, self.max) if self.dim == TWO_ARMS_DIM else (self.q01, self.q99)


@dataclass(frozen=True, eq=False)
class DatasetStatistics:
    """Statistics of one training data set."""

    action: VectorStatistics
    proprio: VectorStatistics | None = None  # None: the data set had no robot states


def unnormalise(actions: np.ndarray, statistics: VectorStatistics) -> np.ndarray:
    """Scale actions (..., D) from [-1, 1] to the data set's units, float64.

    Dimensions outside the mask, such as LIBERO's gripper, stay as they are.
    """
    low, high = statistics.bounds
    # The values are not converted to float64: for the L1 head's float32 output, 0.5 * (values + 1) is computed in
    # float32, as in the original.
    values = np.asarray(actions)
    return np.where(statistics.mask, 0.5 * (values + 1.0) * (high - low + RANGE_EPSILON) + low, values)


def normalise(actions: np.ndarray, statistics: VectorStatistics) -> np.ndarray:
    """Scale actions (..., D) from the data set's units to [-1, 1], float64.

    Dimensions outside the mask, as the gripper, stay as they are. Of the others those that never moved become 0.
    """
    scaled = np.clip(_scaled(actions, statistics), -1.0, 1.0)
    never_moved = statistics.min == statistics.max
    return np.where(statistics.mask, np.where(never_moved, 0.0, scaled), actions)


def normalise_proprio(proprio: np.ndarray, statistics: VectorStatistics) -> np.ndarray:
    """Scale robot states (..., D) to [-1, 1], float64. Dimensions outside the mask are only clipped to [-1, 1]."""
    return np.clip(np.where(statistics.mask, _scaled(proprio, statistics), proprio), -1.0, 1.0)


def _scaled(values: np.ndarray, statistics: VectorStatistics) -> np.ndarray:
    """Map the bounds to -1 and +1, float64, without clipping and regardless of the mask."""
    low, high = statistics.bounds
    return 2.0 * (np.asarray(values, dtype=np.float64) - low) / (high - low + RANGE_EPSILON) - 1.0


def scale_digest(statistics: DatasetStatistics) -> str:
    """Identify how actions and robot states are scaled: with an equal one every token means the same action."""
    vectors = [vector for vector in (statistics.action, statistics.proprio) if vector is not None]
    scales = [[array.tolist() for array in (*vector.bounds, vector.mask)] for vector in vectors]
    return hashlib.sha256(repr(scales).encode()).hexdigest()


def load_statistics(folder: str | Path) -> dict[str, DatasetStatistics]:
    """Read a checkpoint folder's statistics, by the name of the data set (the key).

    They are in dataset_statistics.json, or else in config.json under `norm_stats`. Raises BadInput.
    """
    path = Path(folder) / STATISTICS_FILE
    part = None
    if not path.exists():
        path = Path(folder) / "config.json"
        part = "norm_stats"
    advice = "copy the training run's dataset_statistics.json here"
    statistics = read_fields(path, dict[str, DatasetStatistics], advice, part)
    if not statistics:
        raise BadInput(f"{path}: no data set is listed; {advice}")
    return statistics


def select_key(
    folder: Path,
    statistics: Mapping[str, DatasetStatistics],
    task_suite: str | None,
    unnorm_key: str | None = None,
) -> str:
    """Choose one of the keys of the statistics in `folder` for a task suite. Raises BadInput when none fits.

    It is `unnorm_key` if given; else `<suite>` or `<suite>_no_noops`, in openvla-oft's order; else the first, if all
    scale alike and none names another suite. Nothing is guessed among several scales.
    """
    candidates = [task_suite, f"{task_suite}_no_noops"] if unnorm_key is None else [unnorm_key]
    for key in candidates:
        if key in statistics:
            return str(key)
    have_one_scale = len({scale_digest(each) for each in statistics.values()}) == 1
    suites = SUITE_NAME.findall(" ".join(statistics))
    if unnorm_key is None and have_one_scale and (task_suite in suites or not suites or task_suite is None):
        return next(iter(statistics))
    missing = unnorm_key or task_suite or "an unnamed task_suite"
    keys = ", ".join(sorted(statistics))
    raise BadInput(
        f"{folder}: no statistics for {missing}, only {keys}; use a checkpoint of this suite, or choose one of these "
        "as unnorm_key (--unnorm-key)"
    )


def has_libero_gripper(statistics: VectorStatistics, task_suite: str | None) -> bool:
    """Whether the last number of an action is LIBERO's gripper, which openvla-oft makes binary even if it was scaled.

    Another suite's is one if it was not scaled in training. Without a named suite the policy plays LIBERO.
    """
    is_libero = task_suite is None or SUITE_NAME.match(task_suite) is not None
    return is_libero or not statistics.mask[-1]
