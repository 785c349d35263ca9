"""From run folders and a results file to one compact file, its comparison with another, and its plot."""

import json
import shutil

import pytest

import eval
import train_grpo
from benchmarks import collect, compare, plot
from configs.cli import parse_train
from tests.end_to_end.conftest import flags_into

SEEDS = (1, 2)


@pytest.fixture(scope="module")
def experiment(smoke, tmp_path_factory):
    """A run of seconds, a copy of it as another seed's, and the end of the first one played by eval.py."""
    folder = tmp_path_factory.mktemp("experiment")
    flags = flags_into(smoke, folder / "runs")
    first = train_grpo.run_training(parse_train([*flags, "--seed", str(SEEDS[0])]).config)
    second = shutil.copytree(first, first.with_name("second"))
    description = json.loads((second / "config.json").read_text())
    description["config"]["run"]["seed"] = SEEDS[1]
    (second / "config.json").write_text(json.dumps(description))
    runs = [first, second]
    checkpoint = str(first / "checkpoints" / "latest")
    results = str(folder / "results.json")
    short = ["--init-states", "both", "--first-init-state", "48", "--trials", "3", "--max-env-steps", "16"]
    short += ["--num-envs", "1", "--device", "cpu", "--assets", "lowpoly", "--task-ids", "0"]
    eval.main(["--checkpoint", checkpoint, "--mode", "greedy", "sample", *short, "--out", results])
    collect.main([str(folder / "name.json"), *map(str, runs), "--results", results, "--note", "a trial"])
    return folder / "name.json"


def test_the_file_has_what_tables_and_plots_need(experiment):
    stored = json.loads(experiment.read_text())
    assert [run["seed"] for run in stored["runs"]] == list(SEEDS)
    for run in stored["runs"]:
        assert run["updates"]["global_step"] == [32, 64, 96]
        assert [evaluation["global_step"] for evaluation in run["evaluations"]] == [0, 32, 64, 96]
        assert {"teacher", "greedy", "sample"} <= run["evaluations"][0]["successes"].keys()
        assert run["machine"]["cpus"] > 0
    (results,) = stored["results"]
    assert results["seed"] == SEEDS[0]
    assert {task: len(outcomes) for task, outcomes in results["successes"]["greedy"].items()} == {
        "libero_spatial 0 official from 48": 2,
        "libero_spatial 0 fresh from 0": 1,
    }


def test_a_comparison_pairs_seeds_and_states(experiment, tmp_path, capsys):
    stored = json.loads(experiment.read_text())
    for index, run in enumerate(stored["runs"]):
        run["updates"]["rollout/success_rate"] = [0.5, 0.5, 0.5 + 0.1 * index]
    stored["results"][0]["successes"]["greedy"]["libero_spatial 0 official from 48"] = "11"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(stored))
    compare.main([str(experiment), str(other)])
    rows = {row.split(" | ")[0].strip("| "): row.split(" | ") for row in capsys.readouterr().out.splitlines()}
    assert rows["area"][2] == "2"
    assert 0.5 < float(rows["area"][4]) < 0.55
    assert rows["greedy by state"][2:5] == ["3", "0.000", "0.667"]


def test_the_table_has_start_and_end_of_every_run(experiment, capsys):
    stored = json.loads(experiment.read_text())
    stored["runs"][1]["evaluations"][-1]["successes"]["greedy"] = {"libero_spatial 0 official from 40": "1"}
    experiment.with_name("table.json").write_text(json.dumps(stored))
    compare.main([str(experiment.with_name("table.json"))])
    _, _, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("| 1 | 0 → 0 of 1 |")
    assert "| 0 → 1 of 1 | +100 points" in second


def test_the_plot_is_small(experiment, tmp_path):
    picture = tmp_path / "name.svg"
    plot.main([str(experiment), str(picture)])
    assert 5_000 < picture.stat().st_size < 100_000
