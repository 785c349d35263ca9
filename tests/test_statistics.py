"""Statistics keys, broken files, and proprio against the original evaluation code's outputs (tests/golden)."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from contracts import BadInput
from vla.tokens import NormalisationType, load_statistics, normalise_proprio, select_key, suites_named

GOLDEN = Path(__file__).parent / "golden"
COMBINED = [f"{suite}_no_noops" for suite in ("libero_spatial", "libero_object", "libero_goal", "libero_10")]


@pytest.fixture
def entry() -> dict:
    return json.loads((GOLDEN / "checkpoint" / "dataset_statistics.json").read_text())["libero_tiny_no_noops"]


def write(folder: Path, content: object, name: str = "dataset_statistics.json") -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder


def one_line_error(folder: Path) -> str:
    with pytest.raises(BadInput) as caught:
        load_statistics(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_fields_are_those_of_the_file(entry):
    statistics = load_statistics(GOLDEN / "checkpoint")["libero_tiny_no_noops"]
    for vector, fields in ((statistics.action, entry["action"]), (statistics.proprio, entry["proprio"])):
        for name in ("min", "max", "q01", "q99"):
            np.testing.assert_array_equal(getattr(vector, name), fields[name])
    np.testing.assert_array_equal(statistics.action.mask, [True] * 6 + [False])
    np.testing.assert_array_equal(statistics.proprio.mask, [True] * 8)  # the file has none
    assert (statistics.action.dim, statistics.proprio.dim) == (7, 8)


def test_norm_stats_of_the_config_serve_only_without_a_statistics_file(tmp_path, entry):
    write(tmp_path, {"norm_stats": {"from_config": entry}}, "config.json")
    assert list(load_statistics(tmp_path)) == ["from_config"]
    write(tmp_path, {"from_file": entry})
    assert list(load_statistics(tmp_path)) == ["from_file"]


def test_a_data_set_without_proprio_is_accepted(tmp_path, entry):
    del entry["proprio"]
    assert load_statistics(write(tmp_path, {"key": entry}))["key"].proprio is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("q01", None),
        ("q01", [0.0] * 6),
        ("q99", [0.0] * 6 + ["1"]),
        ("q99", [True] * 7),
        ("min", [[0.0]] * 7),
        ("max", [float("nan")] * 7),
        ("max", [10**400] * 7),
        ("min", []),
        ("mask", [True] * 6),
        ("mask", [1] * 7),
        ("min", [2.0] * 7),
        ("q01", [2.0] * 7),
    ],
)
def test_a_broken_field_is_named(tmp_path, entry, field, value):
    entry["action"][field] = value
    message = one_line_error(write(tmp_path, {"some_key": entry}))
    assert "dataset_statistics.json: some_key.action" in message
    assert field in message


@pytest.mark.parametrize("field", ["min", "max", "q01", "q99"])
@pytest.mark.parametrize("vector", ["action", "proprio"])
def test_a_missing_field_is_named(tmp_path, entry, vector, field):
    del entry[vector][field]
    message = one_line_error(write(tmp_path, {"some_key": entry}))
    assert f"some_key.{vector}" in message
    assert repr(field) in message


@pytest.mark.parametrize("content", [[], {}, {"key": 3}, {"key": {}}, {"key": {"action": None}}])
def test_an_unexpected_structure_names_the_file(tmp_path, content):
    assert "dataset_statistics.json" in one_line_error(write(tmp_path, content))


def test_text_that_is_no_json_names_the_file(tmp_path):
    (tmp_path / "dataset_statistics.json").write_text('{"key": ')
    assert "dataset_statistics.json" in one_line_error(tmp_path)


def test_a_folder_without_statistics_names_what_is_missing(tmp_path):
    assert "config.json" in one_line_error(tmp_path)
    assert "norm_stats" in one_line_error(write(tmp_path, {"model_type": "openvla"}, "config.json"))


@pytest.mark.parametrize(
    ("keys", "suite", "expected"),
    [
        (COMBINED, "libero_goal", "libero_goal_no_noops"),
        ([*COMBINED, "libero_goal"], "libero_goal", "libero_goal_no_noops"),
        (["bridge", "libero_goal"], "libero_goal", "libero_goal"),
        (["libero_tiny_no_noops"], "libero_spatial", "libero_tiny_no_noops"),
        (["libero_4_task_suites_no_noops"], "libero_90", "libero_4_task_suites_no_noops"),
        (["libero_10_no_noops_1.0"], "libero_10", "libero_10_no_noops_1.0"),
    ],
)
def test_key_follows_from_the_suite(keys, suite, expected):
    assert select_key(keys, suite) == expected


def test_an_explicit_key_wins_over_the_suite():
    assert select_key(COMBINED, "libero_goal", "libero_10_no_noops") == "libero_10_no_noops"
    assert (
        select_key(["libero_spatial_no_noops"], "libero_goal", "libero_spatial_no_noops") == "libero_spatial_no_noops"
    )


@pytest.mark.parametrize(
    ("keys", "suite", "unnorm_key"),
    [
        (COMBINED, "libero_90", None),
        (COMBINED, "libero_goal", "libero_goal"),
        (["libero_spatial_no_noops"], "libero_goal", None),
        (["libero_spatial"], "libero_goal", None),
        (["bridge", "fractal"], "libero_goal", None),
        (["bridge"], "libero_goal", ""),
    ],
)
def test_a_key_that_does_not_exist_is_refused_with_those_that_do(keys, suite, unnorm_key):
    with pytest.raises(BadInput) as caught:
        select_key(keys, suite, unnorm_key)
    assert all(key in str(caught.value) for key in keys)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "suites"),
    [
        ("Openvla-oft-SFT-libero-spatial-traj1", {"libero_spatial"}),
        ("Openvla-oft-SFT-libero10-traj1", {"libero_10"}),
        (
            "openvla-7b-oft-finetuned-libero-spatial-object-goal-10",
            {"libero_spatial", "libero_object", "libero_goal", "libero_10"},
        ),
        ("libero_object_no_noops_1.0", {"libero_object"}),
        ("libero-long", {"libero_10"}),
        ("LIBERO_90", {"libero_90"}),
        ("libero_4_task_suites_no_noops", set()),
        ("my-spatial-policy", set()),
    ],
)
def test_suites_are_read_from_names(name, suites):
    assert suites_named(name) == suites


def test_proprio_equals_reference_with_and_without_mask():
    statistics = load_statistics(GOLDEN / "checkpoint")["libero_tiny_no_noops"].proprio
    with np.load(GOLDEN / "postprocess.npz") as golden:
        raw, mask = golden["proprio_raw"], golden["proprio_mask"]
        np.testing.assert_array_equal(normalise_proprio(raw, statistics), golden["proprio_normalized"])
        masked = normalise_proprio(raw, dataclasses.replace(statistics, mask=mask))
        np.testing.assert_array_equal(masked, golden["proprio_normalized_masked"])
        assert (masked[:, ~mask] == np.clip(raw[:, ~mask], -1, 1)).all()


def test_normalisation_type_chooses_the_bounds():
    statistics = load_statistics(GOLDEN / "checkpoint")["libero_tiny_no_noops"].proprio
    for kind, low, high in [
        (NormalisationType.BOUNDS_Q99, statistics.q01, statistics.q99),
        (NormalisationType.BOUNDS, statistics.min, statistics.max),
    ]:
        np.testing.assert_allclose(normalise_proprio(low, statistics, kind), -1.0)
        np.testing.assert_allclose(normalise_proprio(high, statistics, kind), 1.0, atol=1e-7)
        np.testing.assert_allclose(normalise_proprio((low + high) / 2, statistics, kind), 0.0, atol=1e-7)
