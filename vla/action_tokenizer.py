"""Action values <-> bins <-> token ids, normalisation with dataset statistics, and the gripper convention.

The last 256 ids of the Llama-2 vocabulary stand for actions: a value in [-1, 1] falls into one of 256 bins and gets the
id `32000 - bin`, so larger values have smaller ids. There are 256 edges but 255 intervals between them: bin 256 holds
1.0 alone and decodes like bin 255. Everything is float64, because float32 moves values at an edge to the next bin.
Shapes are free: any chunk length, any action dimension.

Source of the formulas: openvla-oft @213c5ff, prismatic/vla/action_tokenizer.py, modeling_prismatic.py and data_utils.py
in prismatic, robot_utils.py in experiments/robot.
"""

import numpy as np

from vla.statistics import RANGE_EPSILON, NormalisationType, VectorStatistics

VOCABULARY_SIZE = 32000  # of Llama-2; the rows above it (pad and filler) are never decoded
NUM_BINS = 256
ACTION_TOKEN_IDS = range(VOCABULARY_SIZE - NUM_BINS, VOCABULARY_SIZE)  # 31744 (value +1) .. 31999 (value -1)
FIRST_ACTION_TOKEN = ACTION_TOKEN_IDS.start

BIN_EDGES = np.linspace(-1.0, 1.0, NUM_BINS)
BIN_CENTRES = (BIN_EDGES[:-1] + BIN_EDGES[1:]) / 2.0


def encode(actions: np.ndarray) -> np.ndarray:
    """Token ids, int64 of the same shape, of normalised actions; values beyond [-1, 1] get the edge bins."""
    values = np.clip(np.asarray(actions, dtype=np.float64), -1.0, 1.0)
    if np.isnan(values).any():
        raise ValueError("actions hold NaN, which no bin can hold")
    return VOCABULARY_SIZE - np.digitize(values, BIN_EDGES)


def decode(ids: np.ndarray) -> np.ndarray:
    """Bin centres, float64 of the same shape. Ids that are no action tokens give the nearest bin's centre."""
    bins = VOCABULARY_SIZE - np.asarray(ids, dtype=np.int64)
    return BIN_CENTRES[np.clip(bins - 1, 0, NUM_BINS - 2)]


def unnormalise(
    actions: np.ndarray, statistics: VectorStatistics, kind: NormalisationType = NormalisationType.BOUNDS_Q99
) -> np.ndarray:
    """Actions in [-1, 1] -> the units of the data set, float64.

    actions: (..., D), from `decode` or from the L1 head; not clipped. Dimensions outside the mask (LIBERO's gripper)
    pass through unchanged.
    """
    low, high = statistics.bounds(kind)
    values = np.asarray(actions)  # 0.5 * (values + 1) stays float32 for the L1 head's float32, as in the original
    return np.where(statistics.mask, 0.5 * (values + 1.0) * (high - low + RANGE_EPSILON) + low, values)


def normalise(
    actions: np.ndarray, statistics: VectorStatistics, kind: NormalisationType = NormalisationType.BOUNDS_Q99
) -> np.ndarray:
    """Actions (..., D) in the units of the data set -> [-1, 1], float64, as the training data were normalised.

    Dimensions outside the mask pass through unchanged and unclipped; dimensions that never moved in the data set
    (min == max) become 0.
    """
    low, high = statistics.bounds(kind)
    values = np.asarray(actions, dtype=np.float64)
    scaled = np.clip(2.0 * (values - low) / (high - low + RANGE_EPSILON) - 1.0, -1.0, 1.0)
    return np.where(statistics.min == statistics.max, 0.0, np.where(statistics.mask, scaled, values))


def to_env(actions: np.ndarray) -> np.ndarray:
    """LIBERO's gripper convention: the last dimension from 1 = open, 0 = close to -1 = open, +1 = close.

    actions: (..., D) un-normalised. Exactly 0.5, which no bin centre is, stays undecided (0). The others are unchanged.
    """
    env_actions = np.array(actions, dtype=np.float64)
    env_actions[..., -1] = -np.sign(2.0 * env_actions[..., -1] - 1.0)
    return env_actions
