"""Every program answers --help fast, what a user got wrong in one line, and tells its shell how it ended."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from command_line import main_guard, parse_flags
from contracts import BadInput, TimeIsUp

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Section:
    size: int = 3
    """Some number."""


@dataclass(frozen=True)
class Flags:
    """A program."""

    section: Section = field(default_factory=Section)
    name: str = "x"
    """Some name."""


def test_flags_of_a_section_have_no_prefix():
    assert parse_flags(Flags, ["--size", "4"], "program.py") == Flags(Section(4))


@pytest.mark.parametrize(
    ("argv", "named"), [(["--sise", "4"], "--size"), (["--size", "four"], "--size"), (["--name"], "--name")]
)
def test_wrong_flags_are_one_line_without_a_box(argv, named):
    with pytest.raises(BadInput, match=named) as caught:
        parse_flags(Flags, argv, "program.py")
    assert not set(str(caught.value)) & set("╭╮╰╯│─")


# exit codes


def run_main(monkeypatch, main) -> int:
    monkeypatch.setattr(sys, "argv", ["program.py"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers would stay
    return main_guard("program.py", main)


def raising(error):
    def main(_):
        raise error

    return main


def test_bad_input_is_2_time_that_is_up_0_an_interrupt_130_and_each_one_line(monkeypatch, capsys):
    assert run_main(monkeypatch, raising(BadInput("what is wrong"))) == 2
    assert capsys.readouterr() == ("", "program.py: what is wrong\n")
    assert run_main(monkeypatch, raising(TimeIsUp("2 hours have passed"))) == 0
    assert capsys.readouterr() == ("program.py: 2 hours have passed\n", "")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert run_main(monkeypatch, raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "program.py, rank 1: interrupted\n")


def test_a_fault_keeps_its_traceback(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        run_main(monkeypatch, raising(ZeroDivisionError()))


# speed

HEAVY = {
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
}
PROGRAM = """
import runpy, sys
sys.path.insert(0, {root!r})
sys.argv[1:] = {argv!r}
try:
    runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
finally:
    print("imported:", *sorted({heavy!r} & set(sys.modules)))
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
    helped = run(module, "--help")
    assert helped.returncode == 0, helped.stderr
    assert helped.stdout.splitlines()[-1] == "imported:"
    refused = run(module, "--no-such-flag")
    assert (refused.returncode, refused.stdout) == (2, "imported:\n")
    assert len(refused.stderr.splitlines()) == 1
