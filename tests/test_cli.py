"""The command line: presets, flat flags, resuming, and one line for everything that the user can repair."""

import gc
import importlib.util
import json
import signal
import sys
from pathlib import Path

import pytest

from configs.cli import answer_at_once, main_guard
from configs.cli import CHANGEABLE_ON_RESUME, parse_command, preset_of, stored_config
from configs.config import TrainConfig, differing_fields, to_dict
from configs.presets import PRESETS, PUBLIC_CHECKPOINTS
from errors import BadInput, TimeIsUp
from quick_imports import begin_imports, end_imports


def changes(argv: list[str], preset: str = "libero_spatial") -> dict:
    """What the flags changed in the preset: name -> value."""
    config = parse_command(argv).config
    return {name: now for name, (_, now) in differing_fields(PRESETS[preset], config).items()}


def refusal(argv: list[str]) -> str:
    with pytest.raises(BadInput) as caught:
        parse_command(argv)
    message = str(caught.value)
    assert "\n" not in message
    assert not set(message) & set("╭╮╰╯│─")  # nothing of the drawn box
    return message


@pytest.fixture
def run_folder(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"config": to_dict(PRESETS["smoke"]), "argv": []}))
    return tmp_path


# presets and flags


def test_without_flags_it_is_7b_on_libero_spatial():
    assert parse_command([]).config == PRESETS["libero_spatial"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_taken_as_it_is(preset):
    command = parse_command(["--preset", preset])
    assert (command.config, command.preset) == (PRESETS[preset], preset)


@pytest.mark.parametrize("spelling", [["--task-suite", "libero_goal"], ["--task-suite=libero_goal"],
                                      ["--task_suite", "libero_goal"], ["--task_suite=libero_goal"]])  # fmt: skip
def test_a_suite_brings_its_own_checkpoint_however_the_flag_is_spelled(spelling):
    assert parse_command(spelling).config == PRESETS["libero_goal"]
    assert parse_command(spelling).config.model.checkpoint == PUBLIC_CHECKPOINTS["libero_goal"]


def test_a_named_preset_goes_before_the_suites():
    assert changes(["--preset", "tiny", "--task-suite", "libero_goal"], "tiny") == {"task_suite": "libero_goal"}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--task-id", "3"], {"task_ids": (3,)}),
        (["--task-ids", "0", "1", "2"], {"task_ids": (0, 1, 2)} ),
        (["--no-warmup"], {"warmup": False}),
        (["--warmup-only"], {"warmup_only": True}),
        (["--warmup-steps", "0"], {"warmup_steps": 0}),
        (["--transition-steps", "10"], {"transition_steps": 10}),
        (["--temperature", "1.6"], {"temperature": 1.6}),
        (["--advantage", "group", "--group-size", "8"], {"advantage": "group", "group_size": 8}),
        (["--num-envs", "8"], {"num_envs": 8}),
        (["--wandb-mode", "offline"], {"wandb_mode": "offline"}),
        (["--eval-init-states", "0", "50"], {"eval_init_states": (0, 50)}),
        (["--target-kl", "0.1"], {"target_kl": 0.1}),
        (["--checkpoint", "/x"], {"checkpoint": "/x"}),
        (["--lr", "1e-5", "--gradient-checkpointing", "off"], {"lr": 1e-5, "gradient_checkpointing": "off"}),
    ],
)  # fmt: skip
def test_flags_are_flat_and_change_one_field_each(argv, expected):
    assert changes(argv) == expected


def test_check_only_is_no_setting_of_the_run():
    command = parse_command(["--check-only"])
    assert command.check_only
    assert command.config == PRESETS["libero_spatial"]


# refusals


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--no-such-flag", "1"], "--no-such-flag"),
        (["stray"], "stray"),
        (["--lr", "fast"], "fast"),
        (["--lr"], "--lr"),
        (["--task-ids", "a"], "--task-ids"),
        (["--teacher", "expert"], "expert"),
        (["--task-suite", "libero_spatail"], "libero_spatail"),
        (["--eval-init-states", "3"], "--eval-init-states"),
        (["--preset", "tinny"], "did you mean tiny?"),
        (["--preset"], "--preset"),
        (["--resume"], "--resume"),
        (["--temperature", "0"], "--temperature must be positive"),
        (["--max-hours", "0"], "--max-hours must be positive"),
        (["--warmup-only", "--no-warmup"], "contradict"),
        (["--advantage", "group"], "--group-size"),
    ],
)
def test_wrong_flags_are_answered_in_one_line(argv, said):
    assert said in refusal(argv)


def test_help_is_printed_and_is_no_error(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_command(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--task-id", "--preset", "--resume", "--no-warmup", "--advantage", "--check-only"):
        assert flag in text
    assert "--task.task-ids" not in text


def test_every_flag_has_a_help_text(capsys):
    with pytest.raises(SystemExit):
        parse_command(["--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for sentence in ("Sampling temperature of the student", "Env steps of a rollout", "Run folder to continue"):
        assert sentence in text


# resuming


def test_a_resumed_run_has_its_stored_configuration(run_folder):
    assert parse_command(["--resume", str(run_folder)]).config == PRESETS["smoke"]


def test_the_same_flag_again_is_no_contradiction(run_folder):
    argv = ["--resume", str(run_folder), "--n-steps", str(PRESETS["smoke"].rollout.n_steps)]
    assert parse_command(argv).config == PRESETS["smoke"]


def test_other_flags_are_refused_with_both_values(run_folder):
    message = refusal(["--resume", str(run_folder), "--lr", "0.5", "--seed", "3"])
    assert "lr (run: 0.0002, now: 0.5)" in message
    assert "seed (run: 0, now: 3)" in message


def test_where_a_run_ends_how_it_is_watched_and_what_is_in_memory_may_change(run_folder, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # optional packages count as installed
    argv = ["--resume", str(run_folder), "--total-steps", "9999", "--wandb-mode", "offline", "--keep-checkpoints", "5",
            "--allow-zero-baseline", "--wandb-project", "other", "--max-hours", "3", "--tensorboard", "--rerun",
            "--micro-batch-size", "1", "--max-batch", "1", "--gradient-checkpointing", "on", "--memory-budget", "24",
            ]  # fmt: skip
    changed = differing_fields(PRESETS["smoke"], parse_command(argv).config)
    assert set(changed) == CHANGEABLE_ON_RESUME - {"allow_zero_baseline"}  # which the preset has on


def test_another_preset_for_a_stored_run_is_refused(run_folder):
    assert "--preset" in refusal(["--resume", str(run_folder), "--preset", "libero_goal"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "not a run folder"),
        ("{half", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ('{"config": 3}', "holds no run configuration"),
        ('{"config": {}}', "should have the fields"),
        ("\x00\x01", "not valid JSON"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(tmp_path, content, said):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert said in refusal(["--resume", str(tmp_path)])


def test_a_config_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "no text in UTF-8" in refusal(["--resume", str(tmp_path)])


def test_the_stored_configuration_is_what_was_written(run_folder):
    assert stored_config(run_folder) == PRESETS["smoke"]
    assert isinstance(stored_config(run_folder), TrainConfig)


# exit codes


def exit_code(monkeypatch, main, argv=()) -> int:
    monkeypatch.setattr(sys, "argv", ["program.py", *argv])
    return main_guard("program.py", main)


def raising(error):
    def main(_):
        raise error

    return main


def test_a_good_end_is_0_and_main_gets_the_flags(monkeypatch):
    received = []
    assert exit_code(monkeypatch, received.append, ["--a", "b"]) == 0
    assert received == [["--a", "b"]]


def test_bad_input_is_2_and_one_line_on_stderr(monkeypatch, capsys):
    assert exit_code(monkeypatch, raising(BadInput("what is wrong"))) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "program.py: what is wrong\n")


def test_an_interrupt_is_130(monkeypatch):
    assert exit_code(monkeypatch, raising(KeyboardInterrupt())) == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_in_good_order_and_the_next_would_kill(monkeypatch, number):
    seen = []

    def main(_):
        try:
            signal.raise_signal(number)
        finally:
            seen.extend(signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM))

    both, before = (signal.SIGINT, signal.SIGTERM), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:  # a test run in the background begins with SIGINT ignored
        at_first = [signal.getsignal(n) for n in both]
        assert exit_code(monkeypatch, main) == 130
        assert seen == [signal.SIG_DFL, signal.SIG_DFL]
        assert [signal.getsignal(n) for n in both] == at_first
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_a_background_job_ignores_stays_ignored(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert exit_code(monkeypatch, lambda _: signal.raise_signal(signal.SIGINT)) == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_time_that_is_up_is_a_good_end(monkeypatch, capsys):
    assert exit_code(monkeypatch, raising(TimeIsUp("2 hours have passed"))) == 0
    assert capsys.readouterr().out == "program.py: 2 hours have passed\n"


def test_a_fault_keeps_its_traceback(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        exit_code(monkeypatch, raising(ZeroDivisionError()))


def test_wrong_flags_are_answered_before_anything_heavy_is_imported(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", "--lr", "fast"])
    with pytest.raises(SystemExit) as stop:
        answer_at_once("train_grpo.py", parse_command)
    assert stop.value.code == 2
    assert "'fast'" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["train_grpo.py"])
    answer_at_once("train_grpo.py", parse_command)  # good flags: returns
    end_imports()


def test_garbage_is_not_collected_during_imports_but_before_and_afterwards():
    begin_imports()
    assert not gc.isenabled()
    imported = [[]]
    end_imports()
    assert gc.isenabled()
    assert not any(imported is tracked for tracked in gc.get_objects())  # out of the collector's sight
    later = [[]]
    end_imports()
    assert any(later is tracked for tracked in gc.get_objects())


# optional packages


@pytest.mark.parametrize(("flag", "module", "package"), [
    ("--tensorboard", "tensorboard", "tensorboard"), ("--rerun", "rerun", "rerun-sdk")
])  # fmt: skip
def test_a_flag_whose_package_is_missing_is_refused_before_any_work(monkeypatch, flag, module, package):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == module else found(name))
    assert refusal([flag]) == (
        f"{flag} needs the package {package}, which is not installed: pip install -r requirements-optional.txt"
    )
    assert parse_command([]).config.run.tensorboard is False


def test_the_preset_of_a_command_line_is_known():
    assert preset_of(["--preset", "tiny", "--lr", "1"]) == "tiny"
    assert preset_of(["--task-suite", "libero_goal"]) == "libero_goal"
    assert preset_of([]) == "libero_spatial"
