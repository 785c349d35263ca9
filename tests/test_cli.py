"""The command lines: presets, flat flags, resuming, help, and one line for everything that the user can repair."""

import ast
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from command_line import main_guard
from configs.cli import parse_eval, parse_train
from configs.config import CHANGEABLE_ON_RESUME, TrainConfig, differing_fields
from configs.eval_config import EvalConfig
from configs.presets import PRESETS, PUBLIC_CHECKPOINTS
from configs.stored import to_dict
from contracts import BadInput, TimeIsUp

ROOT = Path(__file__).parents[1]
CHECKPOINT = ["--checkpoint", "runs/RUN/checkpoints/best"]


def changes(argv: list[str], preset: str = "libero_spatial") -> dict:
    """What the flags changed in the preset: name -> value."""
    config = parse_train(argv).config
    return {name: now for name, (_, now) in differing_fields(PRESETS[preset], config).items()}


def refusal(argv: list[str], parse=parse_train) -> str:
    with pytest.raises(BadInput) as caught:
        parse(argv)
    message = str(caught.value)
    assert not set(message) & set("╭╮╰╯│─")  # nothing of the drawn box
    return message


@pytest.fixture
def run_folder(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"config": to_dict(PRESETS["smoke"]), "argv": []}))
    return tmp_path


# presets and flags


@pytest.mark.parametrize("spelling", [["--task-suite", "libero_goal"], ["--task_suite=libero_goal"]])
def test_a_suite_brings_its_own_checkpoint_however_the_flag_is_spelled(spelling):
    assert parse_train([]).config == PRESETS["libero_spatial"]
    assert parse_train(spelling).config == PRESETS["libero_goal"]
    for preset in ([], ["--preset", "rl"]):
        assert parse_train([*spelling, *preset]).config.model.checkpoint == PUBLIC_CHECKPOINTS["libero_goal"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--check-only", "--task-id", "3"], {"task_ids": (3,)}),
        (["--task-ids", "0", "1", "2"], {"task_ids": (0, 1, 2)}),
        (["--no-warmup", "--data-parallel"], {"warmup": False, "data_parallel": True}),
        (["--temperature", "1.6", "--group-size", "8"], {"temperature": 1.6, "group_size": 8}),
        (["--train-init-states", "5", "40", "--preset", "libero_spatial"], {"train_init_states": (5, 40)}),
        (["--train-init-states", "fresh"], {"train_init_states": "fresh"}),
        (["--target-kl", "0.1", "--micro-batch-size", "2"], {"target_kl": 0.1, "micro_batch_size": 2}),
    ],
)
def test_flags_are_flat_and_change_one_field_each(argv, expected):
    assert changes(argv) == expected


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--no-such-flag", "1"], "--no-such-flag"),
        (["--eval-init-states", "3"], "--eval-init-states"),
        (["--preset", "tinny"], "choose one of libero_spatial"),
        (["--preset", "libero_90"], "--checkpoint is missing"),
        (["--tempature", "1"], "--temperature"),
        (["--temperature", "0"], "--temperature must be above 0"),
    ],
)
def test_wrong_flags_are_answered_in_one_line(argv, said):
    assert said in refusal(argv)


# evaluation


def test_an_evaluation_is_by_default_the_published_protocol():
    config = parse_eval(CHECKPOINT)
    assert (config.trials, config.first_init_state, config.task_ids, config.temperature) == (
        50,
        0,
        None,
        None,
    )
    assert config.model.checkpoint == CHECKPOINT[1]
    assert (
        parse_eval(
            [*CHECKPOINT, "--protocol", "libero", "--num-envs", "8", "--video", "all"]
        ).simulator.num_envs
        == 8
    )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--checkpoint is missing"),
        ([*CHECKPOINT, "--task-suite", "libero"], "libero"),
        ([*CHECKPOINT, "--bddl-file", "x.bddl", "--task-id", "3"], "--bddl-file is one task"),
        *(
            ([*CHECKPOINT, "--protocol", "libero", *flags], f"leave out {flags[0]}")
            for flags in (["--trials", "5"], ["--mode", "sample"], ["--max-env-steps", "10"])
        ),
    ],
)  # fmt: skip
def test_wrong_flags_of_an_evaluation_are_answered_in_one_line(argv, said):
    assert said in refusal(argv, parse_eval)


# resuming


def test_a_resumed_run_has_its_stored_configuration(run_folder):
    assert parse_train(["--resume", str(run_folder)]).config == PRESETS["smoke"]
    again = ["--n-steps", str(PRESETS["smoke"].rollout.n_steps)]  # the same flag again is no contradiction
    assert parse_train(["--resume", str(run_folder), *again]).config == PRESETS["smoke"]


def test_other_flags_are_refused_with_both_values(run_folder):
    message = refusal(["--resume", str(run_folder), "--lr", "0.5", "--seed", "3"])
    assert "lr (run: 0.0002, now: 0.5)" in message
    assert "seed (run: 0, now: 3)" in message
    assert "--preset" in refusal(["--resume", str(run_folder), "--preset", "libero_goal"])


def test_where_a_run_ends_how_it_is_watched_and_what_is_in_memory_may_change(run_folder):
    flags = (
        "--total-steps 9999 --wandb-mode offline --keep-checkpoints 5 --no-allow-zero-baseline --max-hours 3 "
        "--micro-batch-size 1 --max-batch 1 --gradient-checkpointing on --memory-budget 24 --assets folder "
        "--kept-tasks 9 --simulators ray"
    )
    argv = ["--resume", str(run_folder), *flags.split()]
    assert set(differing_fields(PRESETS["smoke"], parse_train(argv).config)) == CHANGEABLE_ON_RESUME


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "not a run folder"),
        (b"{half", "is no JSON"),
        (b'{"config": {}}', "is missing"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(tmp_path, content, said):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert said in refusal(["--resume", str(tmp_path)])


# exit codes


def exit_code(monkeypatch, main, argv=()) -> int:
    monkeypatch.setattr(sys, "argv", ["program.py", *argv])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return main_guard("program.py", main)


def raising(error):
    def main(_):
        raise error

    return main


def test_bad_input_is_2_time_that_is_up_0_an_interrupt_130_and_each_one_line(monkeypatch, capsys):
    assert exit_code(monkeypatch, raising(BadInput("what is wrong"))) == 2
    assert capsys.readouterr() == ("", "program.py: what is wrong\n")
    assert exit_code(monkeypatch, raising(TimeIsUp("2 hours have passed"))) == 0
    assert capsys.readouterr() == ("program.py: 2 hours have passed\n", "")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert exit_code(monkeypatch, raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "program.py, rank 1: interrupted\n")


def test_a_fault_keeps_its_traceback(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        exit_code(monkeypatch, raising(ZeroDivisionError()))


# help

HEAVY = (
    "torch",
    "transformers",
    "timm",
    "peft",
    "mujoco",
    "robosuite",
    "libero",
    "wandb",
    "matplotlib",
    "scipy",
)
PROGRAM = """
import runpy, sys
sys.path.insert(0, {root!r})
sys.argv[1:] = {argv!r}
try:
    runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
finally:
    print("imported:", *sorted(set({heavy!r}) & set(sys.modules)))
"""


@cache
def run(module: str, *argv: str) -> subprocess.CompletedProcess:
    program = PROGRAM.format(root=str(ROOT), argv=list(argv), module=module, heavy=HEAVY)
    environ = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("module", ["train_grpo", "eval"])
def test_help_and_wrong_flags_are_answered_without_heavy_imports(module):
    asked, refused = run(module, "--help"), run(module, "--no-such-flag")
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.splitlines()[-1] == "imported:"
    assert (refused.returncode, refused.stdout, len(refused.stderr.splitlines())) == (2, "imported:\n", 1)
    assert "--no-such-flag" in refused.stderr or "Missing" in refused.stderr


# effects


def test_every_flag_is_read_somewhere():
    """As `config.rollout.n_steps`, `rollout.n_steps` or, where a function takes a section, `settings.n_steps`."""
    sections = {**vars(TrainConfig()), "": EvalConfig()}
    read = set()
    for path in [
        *ROOT.glob("*.py"),
        *(path for room in ("experiment", "rl", "vla", "envs") for path in (ROOT / room).rglob("*.py")),
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                if name in sections or name in ("config", "settings"):
                    read.add(node.attr)
    flags = {field.name for section in sections.values() for field in fields(section)}
    assert flags - read == {"perturb"}  # of which `perturbations` is made
    assert "perturbations" in read


@pytest.mark.parametrize(
    ("parse", "suites", "flags", "said"),
    [
        *((parse, ["metaworld_mt50"], [flag, value], f"{flag}: LIBERO's alone") for parse in (parse_train, parse_eval)
          for flag, value in (("--perturb", "camera"), ("--assets", "lowpoly"), ("--bddl-file", "x.bddl"))),
        (parse_eval, ["metaworld_mt50"], ["--protocol", "libero"], "--protocol: LIBERO's alone"),
        (parse_eval, ["libero_goal", "metaworld_mt50"], [], "a command of its own"),
    ],
)  # fmt: skip
def test_what_is_of_another_simulator_is_refused(parse, suites, flags, said):
    assert said in refusal(["--checkpoint", "x", "--task-suite", *suites, *flags], parse)
