"""Scaling by dataset statistics against the original code's outputs (tests/golden) and closed forms; their files."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from contracts import BadInput
from vla.dataset_statistics import (
    DatasetStatistics,
    VectorStatistics,
    load_statistics,
    normalise,
    normalise_proprio,
    select_key,
    unnormalise,
)

GOLDEN = Path(__file__).parent / "golden"
COMBINED = [f"{suite}_no_noops" for suite in ("libero_spatial", "libero_object", "libero_goal", "libero_10")]
STATISTICS = load_statistics(GOLDEN / "checkpoint")["libero_tiny_no_noops"]


@pytest.fixture
def entry() -> dict:
    """One data set's entry in a statistics file."""
    return json.loads((GOLDEN / "checkpoint" / "dataset_statistics.json").read_text())["libero_tiny_no_noops"]


def write(folder: Path, content: object, name: str = "dataset_statistics.json") -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder


# Scaling


@pytest.mark.parametrize("source", ["discrete", "l1"])
def test_unnormalise_equals_reference(source):
    arrays = np.load(GOLDEN / "case_b_2img_proprio.npz")
    actions = unnormalise(arrays[f"normalized_actions_{source}"], STATISTICS.action)
    assert actions.dtype == np.float64
    np.testing.assert_array_equal(actions, arrays[f"actions_{source}"])


@pytest.mark.parametrize("field", [{"mask": [False, True, True, False, True, False, True]}, {}])
def test_every_dimension_follows_its_own_place_in_the_mask_or_is_scaled_without_one(field, entry, tmp_path):
    del entry["action"]["mask"]
    entry["action"] |= field
    is_scaled = field.get("mask", [True] * 7)
    statistics = load_statistics(write(tmp_path, {"key": entry}))["key"].action
    chunk = np.random.default_rng(0).uniform(-1, 1, (8, 7))
    actions = unnormalise(chunk, statistics)
    low = np.array(entry["action"]["q01"])
    high = np.array(entry["action"]["q99"])
    scaled = 0.5 * (chunk + 1) * (high - low + 1e-8) + low
    np.testing.assert_array_equal(actions, np.where(is_scaled, scaled, chunk))
    np.testing.assert_allclose(normalise(actions, statistics), chunk, atol=1e-12)
    never_moved = dataclasses.replace(statistics, min=statistics.max)
    np.testing.assert_array_equal(normalise(actions, never_moved), np.where(is_scaled, 0.0, actions))


def test_proprio_equals_reference_with_and_without_mask():
    reference = np.load(GOLDEN / "postprocess.npz")
    raw = reference["proprio_raw"]
    mask = reference["proprio_mask"]
    np.testing.assert_array_equal(normalise_proprio(raw, STATISTICS.proprio), reference["proprio_normalized"])
    masked = normalise_proprio(raw, dataclasses.replace(STATISTICS.proprio, mask=mask))
    np.testing.assert_array_equal(masked, reference["proprio_normalized_masked"])
    assert (masked[:, ~mask] == np.clip(raw[:, ~mask], -1, 1)).all()


def test_two_arms_are_scaled_from_their_smallest_to_their_largest_number():
    smallest, q01, q99, largest = np.sort(np.random.default_rng(0).uniform(size=(4, 14)), axis=0)
    statistics = VectorStatistics(smallest, largest, q01, q99)
    np.testing.assert_allclose(unnormalise(np.ones(14), statistics), largest, atol=1e-7)
    np.testing.assert_allclose(normalise_proprio(smallest, statistics), -1, atol=1e-7)


# Files


def test_norm_stats_of_the_config_serve_only_without_a_statistics_file(tmp_path, entry):
    write(tmp_path, {"norm_stats": {"from_config": entry}}, "config.json")
    assert list(load_statistics(tmp_path)) == ["from_config"]
    write(tmp_path, {"from_file": {"action": entry["action"]}})
    assert list(load_statistics(tmp_path)) == ["from_file"]
    assert load_statistics(tmp_path)["from_file"].proprio is None  # a data set without robot states


@pytest.mark.parametrize("change", [{"q99": [-9.0] * 7}, {"q01": [0.0] * 6}, {"mask": [True] * 6}])
def test_vectors_that_contradict_each_other_are_refused(change, entry, tmp_path):
    entry["action"] |= change
    with pytest.raises(BadInput, match=r"key\.action"):
        load_statistics(write(tmp_path, {"key": entry}))


# Keys


def choose(keys: list[str], suite: str | None, unnorm_key: str | None = None) -> str:
    """One of the keys, whose scales all differ unless there is a key called "one"."""
    action = STATISTICS.action
    step = 0 if "one" in keys else 1
    scales = [dataclasses.replace(action, q99=action.q99 + i * step) for i in range(len(keys))]
    statistics = {key: DatasetStatistics(scale) for key, scale in zip(keys, scales, strict=True)}
    return select_key(Path("folder"), statistics, suite, unnorm_key)


@pytest.mark.parametrize(
    ("keys", "suite", "unnorm_key", "expected"),
    [
        (COMBINED, "libero_goal", None, "libero_goal_no_noops"),
        (["libero_goal_no_noops", "libero_goal"], "libero_goal", None, "libero_goal"),
        (["one", "other"], None, None, "one"),
        (["libero_tiny_no_noops"], "libero_spatial", None, "libero_tiny_no_noops"),
        (COMBINED, "libero_goal", "libero_10_no_noops", "libero_10_no_noops"),
    ],
)
def test_key_follows_from_the_suite_unless_one_is_given(keys, suite, unnorm_key, expected):
    assert choose(keys, suite, unnorm_key) == expected


@pytest.mark.parametrize(
    ("keys", "suite", "unnorm_key"),
    [
        (COMBINED, "libero_90", None),
        (COMBINED, "libero_goal", "another"),
        (["libero_goal_no_noops"], "libero_spatial", None),
        (["one", "libero_goal_no_noops"], "libero_spatial", None),
    ],
)
def test_a_key_that_does_not_exist_is_refused_with_those_that_do(keys, suite, unnorm_key):
    with pytest.raises(BadInput, match=", ".join(sorted(keys))):
        choose(keys, suite, unnorm_key)
