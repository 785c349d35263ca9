"""Against the original tokenizer's and evaluation code's outputs (tests/golden), and by closed forms."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from contracts import BadInput
from vla.dataset_statistics import (
    VectorStatistics,
    load_statistics,
    normalise,
    normalise_proprio,
    select_key,
    suites_named,
    unnormalise,
)
from vla.tokens import (
    ACTION_TOKEN_IDS,
    BIN_CENTRES,
    BIN_EDGES,
    FIRST_ACTION_TOKEN,
    decode,
    encode,
    sample_tokens,
    to_env,
    translate,
)

GOLDEN = Path(__file__).parent / "golden"
COMBINED = [f"{suite}_no_noops" for suite in ("libero_spatial", "libero_object", "libero_goal", "libero_10")]


TOKENIZER, POSTPROCESS = np.load(GOLDEN / "action_tokenizer.npz"), np.load(GOLDEN / "postprocess.npz")
STATISTICS = load_statistics(GOLDEN / "checkpoint")["libero_tiny_no_noops"]


def statistics_of(dim: int, gripper: bool) -> VectorStatistics:
    """Ordered like real ones, min <= q01 <= q99 <= max. With a gripper the last dimension is outside the mask."""
    low, q01, q99, high = np.sort(np.random.default_rng(0).normal(size=(4, dim)), axis=0)
    mask = np.array([True] * (dim - 1) + [not gripper])
    return VectorStatistics(min=low, max=high, q01=q01, q99=q99, mask=mask)


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


def test_every_id_but_the_lowest_survives_decode_and_encode():
    ids = np.arange(ACTION_TOKEN_IDS.start, ACTION_TOKEN_IDS.stop)
    expected = np.maximum(ids, ACTION_TOKEN_IDS.start + 1)  # 31744 shares the centre of 31745
    np.testing.assert_array_equal(encode(decode(ids)), expected)


@pytest.mark.parametrize("case", ["case_a_1img", "case_b_2img_proprio"])
@pytest.mark.parametrize("source", ["discrete", "l1"])
def test_unnormalise_equals_reference(case, source):
    arrays = np.load(GOLDEN / f"{case}.npz")
    actions = unnormalise(arrays[f"normalized_actions_{source}"], STATISTICS.action)
    assert actions.dtype == np.float64
    np.testing.assert_array_equal(actions, arrays[f"actions_{source}"])


@pytest.mark.parametrize("case", ["case_c_batch_1img", "case_d_batch_2img_proprio"])
def test_tokens_of_a_batch_become_the_reference_actions(case):
    arrays = np.load(GOLDEN / f"{case}.npz")
    normalised = decode(arrays["responses"]).reshape(-1, 8, 7)
    np.testing.assert_array_equal(normalised, arrays["normalized_actions"])
    np.testing.assert_array_equal(unnormalise(normalised, STATISTICS.action), arrays["actions"])


def test_translated_ids_are_the_nearest_that_the_other_statistics_have():
    theirs = statistics_of(7, gripper=True)
    wider, shifted = (
        dataclasses.replace(theirs, q01=theirs.q01 - 0.5, q99=theirs.q99 + more, min=theirs.min - 1)
        for more in (0.5, -0.1)
    )
    ids = np.random.default_rng(1).choice(ACTION_TOKEN_IDS, size=(20, 8, 7))
    ids[0] = FIRST_ACTION_TOKEN  # 1.0, which has a bin of its own
    wanted = unnormalise(decode(ids), theirs)
    for ours in (wider, shifted):
        translated = translate(ids, theirs, ours)
        every = unnormalise(decode(np.array(ACTION_TOKEN_IDS))[:, None], ours)  # (256, 7)
        nearest = np.abs(every[:, None, None] - wanted).min(axis=0)
        bin_width = (ours.q99 - ours.q01) / 255
        found = np.abs(unnormalise(decode(translated), ours) - wanted)
        assert (found <= nearest + bin_width)[..., :6].all()
    np.testing.assert_array_equal(
        translate(ids, theirs, wider)[..., 6], ids[..., 6]
    )  # the gripper has no statistics
    np.testing.assert_array_equal(translate(ids, theirs, theirs), ids)


@pytest.mark.parametrize(
    "mask", ["1111111", "0000000", "0110101", "1011110", None]
)  # None: without one, all are scaled
def test_every_dimension_follows_its_own_place_in_the_mask(mask, entry, tmp_path):
    entry["action"]["mask"] = mask and [bit == "1" for bit in mask]
    if mask is None:
        del entry["action"]["mask"]
    statistics = load_statistics(write(tmp_path, {"key": entry}))["key"].action
    chunk = np.random.default_rng(0).uniform(-1, 1, (8, 7))
    actions = unnormalise(chunk, statistics)
    for i, bit in enumerate(mask or "1111111"):
        low, high = entry["action"]["q01"][i], entry["action"]["q99"][i]
        expected = chunk[:, i] if bit == "0" else 0.5 * (chunk[:, i] + 1) * (high - low + 1e-8) + low
        np.testing.assert_array_equal(actions[:, i], expected)
    np.testing.assert_allclose(normalise(actions, statistics), chunk, atol=1e-12)


def test_a_dimension_that_never_moved_normalises_to_zero():
    low, high = np.array([0.3, -1.0]), np.array([0.3, 1.0])  # the first is constant
    statistics = VectorStatistics(min=low, max=high, q01=low, q99=high, mask=np.array([True, True]))
    np.testing.assert_allclose(normalise(np.array([0.3, 0.5]), statistics), [0.0, 0.5], atol=1e-7)
    assert normalise(np.array([9.0, 0.5]), statistics)[0] == 0.0


def test_to_env_equals_reference_and_no_action_token_leaves_the_gripper_undecided():
    np.testing.assert_array_equal(to_env(POSTPROCESS["action_in"]), POSTPROCESS["action_env"])
    ids = np.arange(ACTION_TOKEN_IDS.start, ACTION_TOKEN_IDS.stop)[:, None]
    assert set(to_env(decode(ids)).ravel()) == {-1.0, 1.0}


# Statistics of a folder


@pytest.fixture
def entry() -> dict:
    return json.loads((GOLDEN / "checkpoint" / "dataset_statistics.json").read_text())["libero_tiny_no_noops"]


def write(folder: Path, content: object, name: str = "dataset_statistics.json") -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder


def test_norm_stats_of_the_config_serve_only_without_a_statistics_file(tmp_path, entry):
    write(tmp_path, {"norm_stats": {"from_config": entry}}, "config.json")
    assert list(load_statistics(tmp_path)) == ["from_config"]
    write(tmp_path, {"from_file": {"action": entry["action"]}})
    assert list(load_statistics(tmp_path)) == ["from_file"]
    assert load_statistics(tmp_path)["from_file"].proprio is None  # a data set without


@pytest.mark.parametrize(
    ("field", "value"), [("q01", [0.0] * 6), ("max", [float("nan")] * 7), ("mask", [True] * 6)]
)
def test_a_broken_field_is_named(tmp_path, entry, field, value):
    entry["action"][field] = value
    with pytest.raises(BadInput, match=rf"dataset_statistics\.json.*{field} is"):
        load_statistics(write(tmp_path, {"some_key": entry}))


@pytest.mark.parametrize("content", [[], {}, {"key": 3}, {"key": {"action": {"min": [0.0]}}}])
def test_an_unexpected_structure_names_the_file(tmp_path, content):
    with pytest.raises(BadInput, match=r"dataset_statistics\.json"):
        load_statistics(write(tmp_path, content))


@pytest.mark.parametrize(
    ("keys", "suite", "unnorm_key", "expected"),
    [
        (COMBINED, "libero_goal", None, "libero_goal_no_noops"),
        (["bridge", "libero_goal"], "libero_goal", None, "libero_goal"),
        (["libero_tiny_no_noops"], "libero_spatial", None, "libero_tiny_no_noops"),
        (["libero_10_no_noops_1.0"], "libero_10", None, "libero_10_no_noops_1.0"),
        (COMBINED, "libero_goal", "libero_10_no_noops", "libero_10_no_noops"),
    ],
)
def test_key_follows_from_the_suite_unless_one_is_given(keys, suite, unnorm_key, expected):
    assert select_key(keys, suite, unnorm_key) == expected


@pytest.mark.parametrize(
    ("keys", "suite", "unnorm_key"),
    [
        (COMBINED, "libero_90", None),
        (COMBINED, "libero_goal", "libero_goal"),
        (["bridge", "fractal"], "libero_goal", None),
    ],
)
def test_a_key_that_does_not_exist_is_refused_with_those_that_do(keys, suite, unnorm_key):
    with pytest.raises(BadInput, match=", ".join(sorted(keys))):
        select_key(keys, suite, unnorm_key)


@pytest.mark.parametrize(
    ("name", "suites"),
    [
        ("Openvla-oft-SFT-libero-spatial-traj1", {"libero_spatial"}),
        ("Openvla-oft-SFT-libero10-traj1", {"libero_10"}),
        ("openvla-7b-oft-libero-spatial-goal-10", {"libero_spatial", "libero_goal", "libero_10"}),
        ("libero-long", {"libero_10"}),
        ("my-spatial-policy", set()),
    ],
)
def test_suites_are_read_from_names(name, suites):
    assert suites_named(name) == suites


def test_proprio_equals_reference_with_and_without_mask():
    raw, mask = POSTPROCESS["proprio_raw"], POSTPROCESS["proprio_mask"]
    np.testing.assert_array_equal(
        normalise_proprio(raw, STATISTICS.proprio), POSTPROCESS["proprio_normalized"]
    )
    masked = normalise_proprio(raw, dataclasses.replace(STATISTICS.proprio, mask=mask))
    np.testing.assert_array_equal(masked, POSTPROCESS["proprio_normalized_masked"])
    assert (masked[:, ~mask] == np.clip(raw[:, ~mask], -1, 1)).all()


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
    greedy = sample_tokens(logits, 1e-4, _generators(*range(6)))
    assert torch.equal(greedy, logits.argmax(-1) + FIRST_ACTION_TOKEN)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_frequencies_are_the_softmax_at_the_temperature(temperature):
    """100,000 draws of 4 outcomes: the standard error of a frequency is below 0.0016."""
    raw = torch.tensor([0.0, 1.0, 2.0, -1.0])
    logits = torch.full((1, 1, 256), -1e4)
    logits[0, 0, [0, 3, 100, 255]] = raw
    tokens = sample_tokens(logits.expand(1, 100_000, 256), temperature, _generators(0)) - FIRST_ACTION_TOKEN
    frequencies = torch.bincount(tokens[0], minlength=256)[[0, 3, 100, 255]] / 100_000
    np.testing.assert_allclose(frequencies, (raw / temperature).softmax(0), atol=0.007)
