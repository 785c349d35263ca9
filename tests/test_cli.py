"""The command lines of train_grpo.py and eval.py: presets, flat flags, resuming, and refusals that name the flag."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from configs.cli import parse_eval, parse_train
from configs.config import TrainConfig, differing_fields
from configs.presets import PRESETS, PUBLIC_CHECKPOINTS, TINY_CHECKPOINT
from contracts import BadInput

ROOT = Path(__file__).parents[1]

CHECKPOINT = ["--checkpoint", "runs/RUN/checkpoints/best"]


def changes(argv: list[str]) -> dict:
    """What the flags changed in the defaults: name -> value."""
    differing = differing_fields(TrainConfig(), parse_train(argv).config)
    return {name: value for name, (_, value) in differing.items()}


@pytest.fixture
def run_folder(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"config": asdict(PRESETS["smoke"]), "argv": []}))
    return tmp_path


# presets and flags


@pytest.mark.parametrize("flags", ["", "--preset rl", "--preset guide"])
def test_without_a_checkpoint_a_run_starts_from_the_public_one_of_its_suite(flags):
    for suite, more_flags in (
        ("libero_goal", ""),
        ("libero_goal_swap", ""),
        ("libero_goal_camera", "--train-init-states 0 20 --eval-init-states 20 30"),
    ):
        argv = [f"--task-suite={suite}", *flags.split(), *more_flags.split()]
        assert parse_train(argv).config.model.checkpoint == PUBLIC_CHECKPOINTS["libero_goal"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--check_only --task-id 3", {"task_ids": (3,)}),
        ("--learning-rate 1e-4 --total-timesteps 5", {"lr": 1e-4, "total_steps": 5}),  # other programs' names
        ("--no-warmup --task-ids 0 1 2", {"warmup": False, "task_ids": (0, 1, 2)}),
        ("--train-init-states 5 40 --eval_init_states 40 45",
         {"train_init_states": (5, 40), "eval_init_states": (40, 45)}),
    ],
)  # fmt: skip
def test_flags_are_flat_and_change_one_field_each(line, expected):
    assert changes([*CHECKPOINT, *line.split()]) == {"checkpoint": CHECKPOINT[1]} | expected


def test_a_run_starts_from_a_preset_or_from_the_folder_of_another_run(run_folder):
    with pytest.raises(BadInput, match=r"--preset.*--resume.*contradict"):
        parse_train(["--resume", str(run_folder), "--preset", "tiny"])
    with pytest.raises(BadInput, match=r"--resume .*nowhere"):
        parse_train(["--resume", str(run_folder / "nowhere")])
    with pytest.raises(BadInput, match=f"folder, {run_folder}$"):
        parse_train(["--resume", f"{run_folder}/checkpoints/latest"])


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--preset rl --task-suite libero_90", "--checkpoint"),  # no public one is known
        ("--task-suite libero_goal_camera", "--train-init-states"),
    ],
)
def test_values_that_cannot_work_are_refused(line, named):
    with pytest.raises(BadInput, match=named):
        parse_train(line.split())


@pytest.mark.parametrize("line", ["--no-such-flag 1", "--eval-init-states 3", "--preset tinny"])
def test_wrong_flags_exit_with_code_2(capsys, line):
    with pytest.raises(SystemExit) as stop:
        parse_train(line.split())
    assert stop.value.code == 2
    assert line.split()[0] in capsys.readouterr().err


# evaluation


def test_an_evaluation_is_by_default_the_published_protocol():
    config = parse_eval(CHECKPOINT)
    assert config.model.checkpoint == CHECKPOINT[1]
    assert (config.trials, config.first_init_state) == (50, 0)
    assert config.task_ids is config.temperature is None


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--bddl-file x.bddl --task-id 3", "--bddl-file"),
        ("--task-suite libero_goal_swap --prompt leaked", "--prompt"),
        ("--mode greedy --temperature 2", "--temperature"),
        ("--mode", "--mode"),  # an unset variable
        (f"--seed {2**63}", "--seed"),
    ],
)
def test_wrong_flags_of_an_evaluation_are_refused(flags, named):
    with pytest.raises(BadInput, match=named):
        parse_eval([*CHECKPOINT, *flags.split()])


# resuming


def test_the_bundled_policy_is_found_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    config = parse_train(["--preset", "tiny"]).config
    assert config.model.checkpoint == TINY_CHECKPOINT  # a record names no folder of the machine
    (tmp_path / "config.json").write_text(json.dumps({"config": asdict(config)}))
    monkeypatch.chdir(tmp_path)
    for argv in (["--preset", "tiny"], ["--resume", str(tmp_path)]):
        assert parse_train(argv).config.model.checkpoint == str(ROOT / TINY_CHECKPOINT)


def test_a_resumed_run_has_its_stored_settings_except_for_its_end_and_its_memory(run_folder):
    again = ["--n-steps", str(PRESETS["smoke"].rollout.n_steps)]  # the same flag again is no contradiction
    assert parse_train(["--resume", str(run_folder), *again]).config == PRESETS["smoke"]
    changeable = ["--total-steps", "9999", "--memory-budget", "24"]
    resumed = parse_train(["--resume", str(run_folder), *changeable]).config
    assert set(differing_fields(PRESETS["smoke"], resumed)) == {"total_steps", "memory_budget"}
    with pytest.raises(BadInput, match=r"lr .*, seed "):
        parse_train(["--resume", str(run_folder), "--lr", "0.5", "--seed", "3"])
    with pytest.raises(BadInput, match="--preset"):
        parse_train(["--resume", str(run_folder), "--preset", "rl"])


def test_a_run_whose_start_was_deleted_says_so(run_folder):
    stored = json.loads((run_folder / "config.json").read_text())
    stored["config"]["model"]["checkpoint"] = f"{run_folder}/parent/checkpoints/step_576"
    (run_folder / "config.json").write_text(json.dumps(stored))
    with pytest.raises(BadInput, match=r"--resume .*step_576"):
        parse_train(["--resume", str(run_folder)])


@pytest.mark.parametrize("change", [{"lr": "fast"}, {"lr": -1.0}, {"withdrawn": 1}])
def test_settings_of_another_version_are_refused(run_folder, change):
    stored = json.loads((run_folder / "config.json").read_text())
    stored["config"]["update"] |= change
    (run_folder / "config.json").write_text(json.dumps(stored))
    with pytest.raises(BadInput, match="--resume"):
        parse_train(["--resume", str(run_folder)])
