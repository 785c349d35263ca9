"""Convert between action values and token ids; sample action tokens and compute their log-probabilities.

The last 256 ids of the Llama-2 vocabulary stand for actions. A value in [-1, 1] falls into one of the bins 1 to 256 and
gets the id `32000 - bin`, so larger values have smaller ids. There are 256 edges, but only 255 intervals between them:
bin 256 holds 1.0 alone and decodes like bin 255. Everything is float64, because float32 would move values at an edge
to the next bin.

Source of the formulas: openvla-oft @213c5ff, action_tokenizer.py in prismatic/vla and robot_utils.py in
experiments/robot.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

BOS_ID = 1
EOS_ID = 2
PAD_ID = 32000
# "▁". It ends every prompt, because the training data were tokenised as "Out: " + actions.
EMPTY_TOKEN_ID = 29871
VOCABULARY_SIZE = 32000  # of Llama-2; the rows above it (pad and filler) are never decoded
NUM_BINS = 256
ACTION_TOKEN_IDS = range(VOCABULARY_SIZE - NUM_BINS, VOCABULARY_SIZE)  # 31744 (value +1) .. 31999 (value -1)
FIRST_ACTION_TOKEN = ACTION_TOKEN_IDS.start
BIN_EDGES = np.linspace(-1.0, 1.0, NUM_BINS)
BIN_CENTRES = (BIN_EDGES[:-1] + BIN_EDGES[1:]) / 2.0
# Scale of the distribution around an L1 head's action, in normalised units, at temperature 1: 6 bins
LAPLACE_SCALE = 0.05


def encode(actions: np.ndarray) -> np.ndarray:
    """Normalised actions -> token ids, int64 of the same shape. Values beyond [-1, 1] get the outermost bins."""
    clipped = np.clip(np.asarray(actions, dtype=np.float64), -1.0, 1.0)
    return VOCABULARY_SIZE - np.digitize(clipped, BIN_EDGES)


def decode(ids: np.ndarray) -> np.ndarray:
    """Token ids -> bin centres, float64 of the same shape. Ids of other tokens give the nearest bin's centre."""
    bins = VOCABULARY_SIZE - np.asarray(ids, dtype=np.int64)
    intervals = np.clip(bins - 1, 0, len(BIN_CENTRES) - 1)
    return BIN_CENTRES[intervals]


def to_env(actions: np.ndarray) -> np.ndarray:
    """Convert actions (..., D) to LIBERO's gripper convention, float64.

    The last dimension changes from 1 = open, 0 = close to -1 = open, 1 = close.
    """
    env_actions = np.array(actions, dtype=np.float64)
    env_actions[..., -1] = -np.sign(2.0 * env_actions[..., -1] - 1.0)
    return env_actions


def laplace_logits(values: Tensor) -> Tensor:
    """Logits of a discretised Laplace distribution around normalised values: (B, A) -> (B, A, 256) float32.

    -|centre - value| / LAPLACE_SCALE for the centre of each bin. The likeliest bin is the one that `encode` gives the
    value. Bin 256 has the centre that would follow, because `encode` gives it the values that lie there.
    """
    width = 2.0 / (NUM_BINS - 1)
    # Of columns 0 to 255
    centres = torch.linspace(1 + width / 2, -1 + width / 2, NUM_BINS, device=values.device)
    return -(values.float()[..., None] - centres).abs() / LAPLACE_SCALE


def sample_tokens(
    logits: Tensor, temperature: float, generators: Sequence[torch.Generator] | None = None
) -> Tensor:
    """Draw one token id per position from softmax(logits / temperature): logits (B, A, 256) -> ids (B, A) int64.

    Each row has its own CPU generator (None: torch's default generator for all), so that a row's random numbers do not
    depend on the other rows of the batch or on the device.
    """
    batch, num_tokens, num_bins = logits.shape
    row_generators = generators or [torch.default_generator] * batch
    uniform = torch.stack(
        [torch.rand(num_tokens, dtype=torch.float64, generator=generator) for generator in row_generators]
    )
    cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1)
    # The last cumulative sum is 1 only up to rounding. Multiplying by it keeps every draw in range.
    threshold = uniform.to(logits.device) * cumulative[..., -1]
    columns = torch.searchsorted(cumulative, threshold[..., None], right=True).squeeze(-1)
    return columns.clamp(max=num_bins - 1) + FIRST_ACTION_TOKEN


def median_tokens(logits: Tensor) -> Tensor:
    """The medians of softmax(logits) as token ids: logits (B, A, 256) -> ids (B, A) int64.

    A median is the first column at which the cumulative probability reaches one half.
    """
    cumulative = logits.double().softmax(-1).cumsum(-1)
    columns = (cumulative >= 0.5).int().argmax(-1)
    return columns + FIRST_ACTION_TOKEN


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """The tokens' log-probs, log_softmax(logits / temperature): logits (B, A, 256), token ids (B, A) -> (B, A)."""
    columns = (tokens - FIRST_ACTION_TOKEN).to(logits.device)
    return (logits / temperature).log_softmax(-1).gather(-1, columns[..., None]).squeeze(-1)
