"""Dataset statistics of a checkpoint: the ranges that map actions and proprio to [-1, 1] and back.

A checkpoint folder holds `dataset_statistics.json`, or else `norm_stats` inside `config.json`:
    {"<key>": {"action": {"min": [...], "max": [...], "q01": [...], "q99": [...], "mask": [...]}, "proprio": {...}}}
"""

import enum
import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from errors import BadInput
from untrusted.json_file import as_numbers, as_object, brief, read_json, required

RANGE_EPSILON = 1e-8  # added to every range by openvla-oft, so that a dimension that never moved can be divided by it
_SUITE_OF_WORD = {
    **{word: f"libero_{word}" for word in ("spatial", "object", "goal", "10", "90")},
    "long": "libero_10",
}


class NormalisationType(enum.Enum):
    """Which bounds became -1 and +1 in training. The checkpoint doesn't say: it follows from the robot."""

    BOUNDS_Q99 = "bounds_q99"  # 1st and 99th percentile: LIBERO, Bridge
    BOUNDS = "bounds"  # minimum and maximum: ALOHA, RoboTwin (14 dimensions)


def normalisation_of(action_dim: int) -> NormalisationType:
    """How training scaled actions: two-armed robots by minimum and maximum, single arms by quantiles."""
    return NormalisationType.BOUNDS if action_dim == 14 else NormalisationType.BOUNDS_Q99


@dataclass(frozen=True, eq=False)
class VectorStatistics:
    """Of one vector, action or proprio. All arrays (D,) float64; mask (D,) bool, False = passes through unscaled."""

    min: np.ndarray
    max: np.ndarray
    q01: np.ndarray
    q99: np.ndarray
    mask: np.ndarray

    @property
    def dim(self) -> int:
        return len(self.mask)

    def bounds(self, kind: NormalisationType) -> tuple[np.ndarray, np.ndarray]:
        """The values (low, high), each (D,), that are mapped to -1 and +1."""
        return (self.q01, self.q99) if kind is NormalisationType.BOUNDS_Q99 else (self.min, self.max)


@dataclass(frozen=True, eq=False)
class DatasetStatistics:
    action: VectorStatistics
    proprio: VectorStatistics | None  # None: the data set had none


def load_statistics(folder: str | Path) -> dict[str, DatasetStatistics]:
    """All statistics of a checkpoint folder by key. Raises BadInput naming the file and the field."""
    path = Path(folder) / "dataset_statistics.json"
    if path.exists():
        where, entries = str(path), read_json(path)
    else:
        path = Path(folder) / "config.json"
        where = f"{path}: norm_stats"
        entries = as_object(required(read_json(path), "norm_stats", str(path)), where)
    if not entries:
        raise BadInput(f"{where}: holds no dataset statistics; copy dataset_statistics.json of the training run here")
    return {key: _dataset_statistics(entry, f"{where}: {key}") for key, entry in entries.items()}


def _dataset_statistics(entry: Any, where: str) -> DatasetStatistics:
    fields = as_object(entry, where)
    action = _vector_statistics(required(fields, "action", where), f"{where}.action")
    proprio = fields.get("proprio")
    return DatasetStatistics(action, None if proprio is None else _vector_statistics(proprio, f"{where}.proprio"))


def _vector_statistics(entry: Any, where: str) -> VectorStatistics:
    fields = as_object(entry, where)
    dim = len(as_numbers(required(fields, "min", where), f"{where}.min"))
    arrays = {
        name: np.array(as_numbers(required(fields, name, where), f"{where}.{name}", dim))
        for name in ("min", "max", "q01", "q99")
    }
    for low, high in (("min", "max"), ("q01", "q99")):
        if (arrays[low] > arrays[high]).any():
            dimension = int(np.argmax(arrays[low] > arrays[high]))
            raise BadInput(f"{where}: {low} is greater than {high} in dimension {dimension}; recompute the statistics")
    mask = fields.get("mask", [True] * dim)
    if not isinstance(mask, list) or len(mask) != dim or not all(isinstance(x, bool) for x in mask):
        raise BadInput(f"{where}.mask: expected a list of {dim} times true or false, found {brief(mask)}")
    return VectorStatistics(**arrays, mask=np.array(mask))


def select_key(keys: Collection[str], task_suite: str, unnorm_key: str | None = None) -> str:
    """The statistics key to use: `unnorm_key` if given, else `<suite>_no_noops`, `<suite>`, or the only key there is.

    keys: a dict of statistics or just its keys. The only key is not taken when it names another LIBERO suite: that
    checkpoint would run, but with wrong ranges. Raises BadInput with the keys that exist.
    """
    existing = ", ".join(sorted(keys)) or "none"
    if unnorm_key is not None:
        if unnorm_key not in keys:
            raise BadInput(
                f"the checkpoint has no statistics {unnorm_key!r}; it has: {existing}; choose one of these with "
                "--unnorm-key"
            )
        return unnorm_key
    for key in (f"{task_suite}_no_noops", task_suite):
        if key in keys:
            return key
    if len(keys) == 1:
        (key,) = keys
        if not suites_named(key) or task_suite in suites_named(key):
            return key
    raise BadInput(
        f"the checkpoint has no statistics for {task_suite}; it has: {existing}; "
        "use a checkpoint of this suite, or choose one of these with --unnorm-key"
    )


def suites_named(name: str) -> set[str]:
    """LIBERO suites that a name of a checkpoint or of statistics mentions.

    "Openvla-oft-SFT-libero10-traj1" -> {libero_10}; "openvla-7b-oft-finetuned-libero-spatial-object" -> two of them;
    "libero_4_task_suites" -> none.
    """
    words = re.findall(r"libero|[a-z]+|[0-9]+", name.lower())
    suites = set()
    for start in (i + 1 for i, word in enumerate(words) if word == "libero"):
        for word in takewhile(_SUITE_OF_WORD.__contains__, words[start:]):
            suites.add(_SUITE_OF_WORD[word])
    return suites


def normalise_proprio(
    proprio: np.ndarray, statistics: VectorStatistics, kind: NormalisationType = NormalisationType.BOUNDS_Q99
) -> np.ndarray:
    """Robot state (..., D) -> [-1, 1], float64. The clip to [-1, 1] also holds for dimensions outside the mask.

    Source: openvla-oft @213c5ff, experiments/robot/openvla_utils.py (evaluation; training agrees on LIBERO).
    """
    low, high = statistics.bounds(kind)
    values = np.asarray(proprio, dtype=np.float64)
    scaled = 2.0 * (values - low) / (high - low + RANGE_EPSILON) - 1.0
    return np.clip(np.where(statistics.mask, scaled, values), -1.0, 1.0)
