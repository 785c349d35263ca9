"""Action values <-> bins <-> token ids, normalisation with dataset statistics, sampling, and log-probabilities.

The last 256 ids of the Llama-2 vocabulary stand for actions: a value in [-1, 1] falls into one of 256 bins and gets the
id `32000 - bin`, so larger values have smaller ids. There are 256 edges but 255 intervals between them: bin 256 holds
1.0 alone and decodes like bin 255. Everything is float64, because float32 moves values at an edge to the next bin.

Source of the formulas: openvla-oft @213c5ff, prismatic/vla/action_tokenizer.py, modeling_prismatic.py and data_utils.py
in prismatic, robot_utils.py and openvla_utils.py in experiments/robot.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contracts import BadInput, read_json

BOS_ID, EOS_ID, PAD_ID = 1, 2, 32000
EMPTY_TOKEN_ID = (
    29871  # "▁": ends every prompt of the training data, a by-product of tokenising "Out: " + actions
)
VOCABULARY_SIZE = 32000  # of Llama-2; the rows above it (pad and filler) are never decoded
NUM_BINS = 256
ACTION_TOKEN_IDS = range(VOCABULARY_SIZE - NUM_BINS, VOCABULARY_SIZE)  # 31744 (value +1) .. 31999 (value -1)
FIRST_ACTION_TOKEN = ACTION_TOKEN_IDS.start
BIN_EDGES = np.linspace(-1.0, 1.0, NUM_BINS)
BIN_CENTRES = (BIN_EDGES[:-1] + BIN_EDGES[1:]) / 2.0
STATISTICS_FILE = "dataset_statistics.json"
RANGE_EPSILON = (
    1e-8  # added to every range by openvla-oft, so that a dimension that never moved can be divided by it
)
_SUITE_OF_WORD = {"long": "libero_10"} | {w: f"libero_{w}" for w in ("spatial", "object", "goal", "10", "90")}


@dataclass(frozen=True, eq=False)
class VectorStatistics:
    """Of one vector, action or proprio. Arrays (D,) float64: q01 and q99, 1st and 99th percentile, became -1 and +1."""

    min: np.ndarray
    max: np.ndarray
    q01: np.ndarray
    q99: np.ndarray
    mask: np.ndarray  # (D,) bool, False = passes through unscaled

    @property
    def dim(self) -> int:
        return len(self.mask)


@dataclass(frozen=True, eq=False)
class DatasetStatistics:
    action: VectorStatistics
    proprio: VectorStatistics | None  # None: the data set had none


def encode(actions: np.ndarray) -> np.ndarray:
    """Token ids, int64 of the same shape, of normalised actions; values beyond [-1, 1] get the edge bins."""
    return VOCABULARY_SIZE - np.digitize(np.clip(np.asarray(actions, dtype=np.float64), -1.0, 1.0), BIN_EDGES)


def decode(ids: np.ndarray) -> np.ndarray:
    """Bin centres, float64 of the same shape. Ids that are no action tokens give the nearest bin's centre."""
    bins = VOCABULARY_SIZE - np.asarray(ids, dtype=np.int64)
    return BIN_CENTRES[np.clip(bins - 1, 0, NUM_BINS - 2)]


def unnormalise(actions: np.ndarray, statistics: VectorStatistics) -> np.ndarray:
    """Actions (..., D) in [-1, 1] -> the data set's units, float64. Outside the mask (LIBERO's gripper) unchanged."""
    low, high = statistics.q01, statistics.q99
    values = np.asarray(
        actions
    )  # 0.5 * (values + 1) stays float32 for the L1 head's float32, as in the original
    return np.where(statistics.mask, 0.5 * (values + 1.0) * (high - low + RANGE_EPSILON) + low, values)


def normalise(actions: np.ndarray, statistics: VectorStatistics) -> np.ndarray:
    """Actions (..., D) in the data set's units -> [-1, 1], float64. Outside the mask unchanged; never moved: 0."""
    scaled = np.clip(_scaled(actions, statistics), -1.0, 1.0)
    return np.where(statistics.min == statistics.max, 0.0, np.where(statistics.mask, scaled, actions))


def normalise_proprio(proprio: np.ndarray, statistics: VectorStatistics) -> np.ndarray:
    """Robot state (..., D) -> [-1, 1], float64. The clip to [-1, 1] also holds for dimensions outside the mask."""
    return np.clip(np.where(statistics.mask, _scaled(proprio, statistics), proprio), -1.0, 1.0)


def _scaled(values: np.ndarray, statistics: VectorStatistics) -> np.ndarray:
    low, high = statistics.q01, statistics.q99
    return 2.0 * (np.asarray(values, dtype=np.float64) - low) / (high - low + RANGE_EPSILON) - 1.0


def same_actions(a: VectorStatistics, b: VectorStatistics) -> bool:
    """Whether every token means the same action under both statistics."""
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("q01", "q99", "mask"))


def same_statistics(a: DatasetStatistics, b: DatasetStatistics) -> bool:
    """The same for the robot's state, too."""
    if a.proprio is None or b.proprio is None:
        return a.proprio is b.proprio and same_actions(a.action, b.action)
    return same_actions(a.action, b.action) and same_actions(a.proprio, b.proprio)


def translate(ids: np.ndarray, source: VectorStatistics, target: VectorStatistics) -> np.ndarray:
    """Ids (..., D) under the statistics `source` -> those of the nearest actions that there are under `target`."""
    values = np.where(
        ids == FIRST_ACTION_TOKEN, 1.0, decode(ids)
    )  # the bin of 1.0 alone decodes as the one below it
    nearest = normalise(unnormalise(values, source), target).round(9)  # 1.0 must not miss its bin
    return np.where(source.mask, encode(nearest), ids)


def to_env(actions: np.ndarray) -> np.ndarray:
    """LIBERO's gripper convention, float64 (..., D): the last dimension from 1 = open, 0 = close to -1 and +1."""
    env_actions = np.array(actions, dtype=np.float64)
    env_actions[..., -1] = -np.sign(2.0 * env_actions[..., -1] - 1.0)
    return env_actions


def sample_tokens(
    logits: Tensor, temperature: float, generators: Sequence[torch.Generator] | None = None
) -> Tensor:
    """One token id per position, (B, A) int64, from softmax(logits / temperature); logits (B, A, 256).

    By one CPU generator per row (None: torch's default one), so that a row's draw does not depend on batch or device.
    """
    batch, num_tokens, num_bins = logits.shape
    sources = generators or [torch.default_generator] * batch
    uniform = torch.stack(
        [torch.rand(num_tokens, dtype=torch.float64, generator=source) for source in sources]
    )
    cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1)
    # The last sum is 1 up to rounding; scaling by it keeps every draw inside.
    threshold = uniform.to(logits.device) * cumulative[..., -1]
    columns = torch.searchsorted(cumulative, threshold[..., None], right=True).squeeze(-1)
    return columns.clamp(max=num_bins - 1) + FIRST_ACTION_TOKEN


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log_softmax(logits / temperature) at the tokens: (B, A, 256) and ids (B, A) -> (B, A)."""
    columns = (tokens - FIRST_ACTION_TOKEN).to(logits.device)
    return (logits / temperature).log_softmax(-1).gather(-1, columns[..., None]).squeeze(-1)


def load_statistics(folder: str | Path) -> dict[str, DatasetStatistics]:
    """A checkpoint folder's statistics by key: of dataset_statistics.json, or else of config.json's `norm_stats`."""
    path = Path(folder) / STATISTICS_FILE
    entries, found = read_json(path) if path.exists() else None, {}
    try:
        if entries is None:
            path = Path(folder) / "config.json"
            entries = read_json(path)["norm_stats"]
        for key, entry in entries.items():
            proprio = _vector(entry["proprio"]) if entry.get("proprio") else None
            found[key] = DatasetStatistics(_vector(entry["action"]), proprio)
        if not found:
            raise LookupError("it is empty")
        return found
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        repair = "copy dataset_statistics.json of the training run here"
        raise BadInput(f"{path}: no usable dataset statistics ({error!r}); {repair}") from error


def _vector(entry: dict[str, Any]) -> VectorStatistics:
    fields = {name: np.array(entry[name], dtype=np.float64) for name in ("min", "max", "q01", "q99")}
    mask = np.array(entry.get("mask", [True] * len(fields["min"])), dtype=bool)
    for name, values in (fields | {"mask": mask}).items():
        if values.shape != fields["min"].shape or not np.isfinite(values).all():
            raise ValueError(f"{name} is {entry[name]}, expected {len(fields['min'])} numbers")
    return VectorStatistics(**fields, mask=mask)


def select_key(keys: Collection[str], task_suite: str, unnorm_key: str | None = None) -> str:
    """`unnorm_key` if given, else `<suite>_no_noops`, `<suite>`, or the only key, unless it names another suite."""
    for key in (f"{task_suite}_no_noops", task_suite) if unnorm_key is None else (unnorm_key,):
        if key in keys:
            return key
    only = next(iter(keys), "")
    if unnorm_key is None and len(keys) == 1 and (not suites_named(only) or task_suite in suites_named(only)):
        return only
    raise BadInput(
        f"the checkpoint has no statistics {unnorm_key or f'for {task_suite}'}; it has: {', '.join(sorted(keys))}; "
        "use a checkpoint of this suite, or choose one of these with --unnorm-key"
    )


def suites_named(name: str) -> set[str]:
    """LIBERO suites that a name mentions: "7b-libero-spatial-object" -> two; "libero_4_task_suites" -> none."""
    words = re.findall(r"libero|[a-z]+|[0-9]+", name.lower())
    starts = [i + 1 for i, word in enumerate(words) if word == "libero"]
    return {
        _SUITE_OF_WORD[word]
        for start in starts
        for word in takewhile(_SUITE_OF_WORD.__contains__, words[start:])
    }
