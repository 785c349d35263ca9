"""Action tokens against the original tokenizer's and evaluation code's outputs (tests/golden), and closed forms."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vla.tokens import (
    ACTION_TOKEN_IDS,
    BIN_CENTRES,
    BIN_EDGES,
    FIRST_ACTION_TOKEN,
    decode,
    encode,
    median_tokens,
    sample_tokens,
    to_env,
)

GOLDEN = Path(__file__).parent / "golden"
TOKENIZER = np.load(GOLDEN / "action_tokenizer.npz")
ALL_IDS = np.array(ACTION_TOKEN_IDS)


def test_bins_equal_reference():
    np.testing.assert_array_equal(BIN_EDGES, TOKENIZER["bins"])
    np.testing.assert_array_equal(BIN_CENTRES, TOKENIZER["bin_centers"])
    assert TOKENIZER["action_token_begin_idx"] + 1 == ACTION_TOKEN_IDS.start  # the reference's is exclusive
    assert len(ACTION_TOKEN_IDS) == 256


@pytest.mark.parametrize("dtype", ["f64", "f32"])
def test_encode_equals_reference_at_edges_and_between(dtype):
    ids = encode(TOKENIZER[f"encode_in_{dtype}"])
    assert ids.dtype == np.int64
    np.testing.assert_array_equal(ids, TOKENIZER[f"encode_ids_{dtype}"])
    np.testing.assert_array_equal(encode(TOKENIZER["chunk_in"]), TOKENIZER["chunk_ids"])


def test_decode_equals_reference_also_outside_the_action_tokens():
    actions = decode(TOKENIZER["decode_ids"])
    assert actions.dtype == np.float64
    np.testing.assert_array_equal(actions, TOKENIZER["decode_actions"])
    np.testing.assert_array_equal(decode(encode(TOKENIZER["encode_in_f64"])), TOKENIZER["roundtrip_f64"])


def test_to_env_equals_reference_and_no_action_token_leaves_the_gripper_undecided():
    reference = np.load(GOLDEN / "postprocess.npz")
    np.testing.assert_array_equal(to_env(reference["action_in"]), reference["action_env"])
    assert set(to_env(decode(ALL_IDS[:, None])).ravel()) == {-1.0, 1.0}


# Median


def logits_of(**probabilities: float) -> torch.Tensor:
    """(1, 1, 256) for columns `cN`; all others have the rest in equal shares."""
    rest = (1 - sum(probabilities.values())) / (256 - len(probabilities))
    distribution = torch.full((256,), rest, dtype=torch.float64)
    for column, probability in probabilities.items():
        distribution[int(column[1:])] = probability
    return distribution.log()[None, None]


@pytest.mark.parametrize(
    ("logits", "column"),
    [
        (torch.zeros(1, 1, 256), 127),  # 128 of 256 equal columns are exactly one half
        (logits_of(c9=0.5, c200=0.5), 9),  # a tie: the first of the two
        (logits_of(c255=1.0), 255),
        # A spike of 30 % is the argmax, and the median lies in the wide rest: 0.3 + 0.7 * 73 / 255 is above one half.
        (logits_of(c0=0.3), 73),
    ],
)
def test_the_median_is_the_column_at_which_the_cumulative_probability_reaches_one_half(logits, column):
    assert median_tokens(logits).item() == FIRST_ACTION_TOKEN + column


# Sampling


@pytest.fixture(scope="module")
def logits():
    return torch.randn(6, 56, 256, generator=torch.Generator().manual_seed(0)) * 2


def _generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_draw_does_not_depend_on_the_batch_around_it(logits):
    together = sample_tokens(logits, 1.3, _generators(*range(6)))
    alone = torch.cat([sample_tokens(logits[i : i + 1], 1.3, _generators(i)) for i in range(6)])
    assert torch.equal(together, alone)
    assert torch.equal(sample_tokens(logits[[4, 1]], 1.3, _generators(4, 1)), together[[4, 1]])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_frequencies_are_the_softmax_at_the_temperature(temperature):
    """100,000 draws of 4 outcomes: the standard error of a frequency is below 0.0016."""
    columns = [0, 3, 100, 255]
    four_logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    logits = torch.full((1, 1, 256), -1e4)
    logits[0, 0, columns] = four_logits
    tokens = sample_tokens(logits.expand(1, 100_000, 256), temperature, _generators(0)) - FIRST_ACTION_TOKEN
    frequencies = torch.bincount(tokens[0], minlength=256)[columns] / 100_000
    np.testing.assert_allclose(frequencies, (four_logits / temperature).softmax(0), atol=0.007)
