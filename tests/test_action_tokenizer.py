"""Against the original tokenizer's and evaluation code's outputs (tests/golden), and by closed forms."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vla.tokens import (
    ACTION_TOKEN_IDS,
    BIN_CENTRES,
    BIN_EDGES,
    NormalisationType,
    VectorStatistics,
    decode,
    encode,
    load_statistics,
    normalise,
    to_env,
    unnormalise,
)

GOLDEN = Path(__file__).parent / "golden"
RANDOMISED = settings(deadline=None, max_examples=100)
KINDS = list(NormalisationType)


@pytest.fixture(scope="module")
def tokenizer_golden():
    with np.load(GOLDEN / "action_tokenizer.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def postprocess_golden():
    with np.load(GOLDEN / "postprocess.npz") as arrays:
        return dict(arrays)


def statistics_of(dim: int, gripper: bool) -> VectorStatistics:
    """Ordered like real ones, min <= q01 <= q99 <= max. With a gripper the last dimension is outside the mask."""
    low, q01, q99, high = np.sort(np.random.default_rng(0).normal(size=(4, dim)), axis=0)
    mask = np.array([True] * (dim - 1) + [not gripper])
    return VectorStatistics(min=low, max=high, q01=q01, q99=q99, mask=mask)


def test_bins_equal_reference(tokenizer_golden):
    np.testing.assert_array_equal(BIN_EDGES, tokenizer_golden["bins"])
    np.testing.assert_array_equal(BIN_CENTRES, tokenizer_golden["bin_centers"])
    assert (
        tokenizer_golden["action_token_begin_idx"] + 1 == ACTION_TOKEN_IDS.start
    )  # the reference's bound is exclusive
    assert len(ACTION_TOKEN_IDS) == 256


@pytest.mark.parametrize("dtype", ["f64", "f32"])
def test_encode_equals_reference_at_edges_and_between(tokenizer_golden, dtype):
    ids = encode(tokenizer_golden[f"encode_in_{dtype}"])
    assert ids.dtype == np.int64
    np.testing.assert_array_equal(ids, tokenizer_golden[f"encode_ids_{dtype}"])


def test_encode_keeps_the_shape_of_a_chunk(tokenizer_golden):
    np.testing.assert_array_equal(encode(tokenizer_golden["chunk_in"]), tokenizer_golden["chunk_ids"])


def test_decode_equals_reference_also_outside_the_action_tokens(tokenizer_golden):
    actions = decode(tokenizer_golden["decode_ids"])
    assert actions.dtype == np.float64
    np.testing.assert_array_equal(actions, tokenizer_golden["decode_actions"])
    round_trip = decode(encode(tokenizer_golden["encode_in_f64"]))
    np.testing.assert_array_equal(round_trip, tokenizer_golden["roundtrip_f64"])


def test_every_id_but_the_lowest_survives_decode_and_encode():
    ids = np.arange(ACTION_TOKEN_IDS.start, ACTION_TOKEN_IDS.stop)
    expected = np.maximum(ids, ACTION_TOKEN_IDS.start + 1)  # 31744 shares the centre of 31745
    np.testing.assert_array_equal(encode(decode(ids)), expected)


@RANDOMISED
@given(hnp.arrays(np.float64, hnp.array_shapes(max_dims=3, max_side=8), elements=st.floats(-1, 1)))
def test_round_trip_moves_a_value_by_at_most_half_a_bin(actions):
    assert np.abs(decode(encode(actions)) - actions).max() <= 1 / 255 + 1e-15


@RANDOMISED
@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_a_larger_value_never_has_a_larger_id(first, second):
    low, high = sorted((first, second))
    assert encode(low) >= encode(high)


@pytest.mark.parametrize("value", [1.0, 1.5, 1e300, np.inf])
def test_values_beyond_the_range_get_the_edge_ids(value):
    assert encode(value) == 31744
    assert encode(-value) == 31999


def test_nan_is_refused():
    with pytest.raises(ValueError, match="NaN"):
        encode(np.array([0.0, np.nan]))


@pytest.mark.parametrize("case", ["case_a_1img", "case_b_2img_proprio"])
@pytest.mark.parametrize("source", ["discrete", "l1"])
def test_unnormalise_equals_reference(case, source):
    statistics = load_statistics(GOLDEN / "checkpoint")["libero_tiny_no_noops"].action
    with np.load(GOLDEN / f"{case}.npz") as arrays:
        actions = unnormalise(arrays[f"normalized_actions_{source}"], statistics)
        assert actions.dtype == np.float64
        np.testing.assert_array_equal(actions, arrays[f"actions_{source}"])


@pytest.mark.parametrize("case", ["case_c_batch_1img", "case_d_batch_2img_proprio"])
def test_tokens_of_a_batch_become_the_reference_actions(case):
    statistics = load_statistics(GOLDEN / "checkpoint")["libero_tiny_no_noops"].action
    with np.load(GOLDEN / f"{case}.npz") as arrays:
        normalised = decode(arrays["responses"]).reshape(-1, 8, 7)
        np.testing.assert_array_equal(normalised, arrays["normalized_actions"])
        np.testing.assert_array_equal(unnormalise(normalised, statistics), arrays["actions"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(7,), (8, 7), (2, 25, 14), (0, 7)])
def test_unnormalised_actions_normalise_back(kind, shape):
    statistics = statistics_of(shape[-1], gripper=False)
    actions = np.random.default_rng(1).uniform(-1, 1, shape)
    np.testing.assert_allclose(normalise(unnormalise(actions, statistics, kind), statistics, kind), actions, atol=1e-12)


def test_bounds_map_to_the_ends_of_the_range():
    statistics = statistics_of(14, gripper=False)
    for kind, low, high in [
        (NormalisationType.BOUNDS_Q99, statistics.q01, statistics.q99),
        (NormalisationType.BOUNDS, statistics.min, statistics.max),
    ]:
        np.testing.assert_allclose(unnormalise(-np.ones(14), statistics, kind), low, atol=1e-7)
        np.testing.assert_allclose(unnormalise(np.ones(14), statistics, kind), high, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_dimensions_outside_the_mask_pass_through_unclipped(kind):
    statistics = statistics_of(7, gripper=True)
    actions = np.full((8, 7), 3.0)
    assert (unnormalise(actions, statistics, kind)[:, -1] == 3.0).all()
    assert (normalise(actions, statistics, kind)[:, -1] == 3.0).all()


def test_normalise_clips_but_unnormalise_does_not():
    statistics = statistics_of(7, gripper=False)
    far = np.full(7, 100.0)
    assert (normalise(far, statistics) == 1.0).all()
    assert (unnormalise(far, statistics) > statistics.q99).all()


def test_a_dimension_that_never_moved_normalises_to_zero():
    low, high = np.array([0.3, -1.0]), np.array([0.3, 1.0])  # the first is constant
    statistics = VectorStatistics(min=low, max=high, q01=low, q99=high, mask=np.array([True, True]))
    np.testing.assert_allclose(normalise(np.array([0.3, 0.5]), statistics), [0.0, 0.5], atol=1e-7)
    assert normalise(np.array([9.0, 0.5]), statistics)[0] == 0.0


def test_to_env_equals_reference(postprocess_golden):
    np.testing.assert_array_equal(to_env(postprocess_golden["action_in"]), postprocess_golden["action_env"])


@RANDOMISED
@given(hnp.arrays(np.float64, (3, 8, 7), elements=st.floats(-2, 2)))
def test_to_env_changes_only_the_gripper_and_not_its_input(actions):
    before = actions.copy()
    env_actions = to_env(actions)
    np.testing.assert_array_equal(actions, before)
    np.testing.assert_array_equal(env_actions[..., :-1], before[..., :-1])
    assert (env_actions[..., -1][before[..., -1] > 0.5] == -1).all()  # open
    assert (env_actions[..., -1][before[..., -1] < 0.5] == 1).all()  # close


def test_no_action_token_leaves_the_gripper_undecided():
    ids = np.arange(ACTION_TOKEN_IDS.start, ACTION_TOKEN_IDS.stop)[:, None]
    assert set(to_env(decode(ids)).ravel()) == {-1.0, 1.0}
