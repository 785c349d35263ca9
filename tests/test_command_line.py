"""Every program answers --help fast, what a user got wrong in one line, and tells its shell how it ended."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from command_line import SET_BY_LAUNCHERS, main_guard, parse_flags
from contracts import BadInput, TimeIsUp

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Section:
    size: int = 3
    """Some number, which is
    explained in two lines."""


@dataclass(frozen=True)
class Flags:
    """A program."""

    section: Section = field(default_factory=Section)
    name: str = "x"
    """Some name."""


def test_flags_of_a_section_have_no_prefix():
    assert parse_flags(Flags, ["--size", "4"], "program.py") == Flags(Section(4))


def test_help_fills_its_lines_wherever_the_source_breaks_them(capsys):
    with pytest.raises(SystemExit):
        parse_flags(Flags, ["--help"], "program.py")
    assert "Some number, which is explained in two lines." in capsys.readouterr().out


def test_help_begins_with_the_description_of_the_program(capsys):
    with pytest.raises(SystemExit):
        parse_flags(Flags, ["--help"], "program.py", description="Measure something.")
    assert "Measure something." in capsys.readouterr().out


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
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert run_main(monkeypatch, raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "program.py, rank 1: interrupted\n")


def test_a_fault_keeps_its_traceback(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        run_main(monkeypatch, raising(ZeroDivisionError()))


# what containers and clusters do to the environment


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 RANK= "),
        ({"WORLD_SIZE": "two", "RANK": "0", "LOCAL_RANK": "0"}, "WORLD_SIZE=two"),
        ({"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}, "RANK=2"),
    ],
)
def test_half_a_description_of_ranks_is_one_line(monkeypatch, capsys, variables, named):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run_main(monkeypatch, raising(AssertionError("it must not start"))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_a_process_that_is_alone_is_the_only_rank_whatever_the_cluster_says(monkeypatch):
    for name, value in {"WORLD_SIZE": "1", "RANK": "3", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    seen = []
    assert (
        run_main(monkeypatch, lambda _: seen.append({"WORLD_SIZE", "RANK", "LOCAL_RANK"} & set(os.environ)))
        == 0
    )
    assert seen == [set()]


def test_a_path_that_may_not_be_read_is_one_line(monkeypatch, capsys):
    assert run_main(monkeypatch, raising(PermissionError(13, "Permission denied", "/root/checkpoint"))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "/root/checkpoint" in line


ENVIRONMENT = """
import getpass, os, pathlib, pwd, sys

class NoEntry:
    def __call__(self, *_):
        raise KeyError("uid not found")

pwd.getpwuid = NoEntry()
from command_line import main_guard
from envs.tasks import cache_dir

def main(_):
    print("shown")
    print("told", file=sys.stderr)
    first_file = open(os.devnull)
    facts = [getpass.getuser(), str(pathlib.Path.home()), str(cache_dir()), str(first_file.fileno())]
    pathlib.Path(sys.argv[1]).write_text("\\n".join(facts))

sys.exit(main_guard("program.py", main))
"""


def test_without_home_name_and_standard_streams_a_program_runs(tmp_path):
    """A user without an entry in passwd, and stdin, stdout and stderr closed, as a scheduler may start a program."""
    facts = tmp_path / "facts"
    command = [sys.executable, "-c", ENVIRONMENT, str(facts)]
    left_out = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME", "VLA_GRPO_CACHE")
    environ = {name: value for name, value in os.environ.items() if name not in left_out}
    environ |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "PYTHONUSERBASE": str(tmp_path)}
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], cwd=tmp_path, env=environ, timeout=300
    )
    assert ended.returncode == 0
    name, home, cache, descriptor = facts.read_text().splitlines()
    assert name
    assert Path(home).is_absolute()
    assert Path(cache).is_absolute()
    assert int(descriptor) > 2  # no file takes the number of a standard stream
    assert not (tmp_path / "~").exists()


def test_a_name_that_the_locale_cannot_write_is_refused_with_the_locale():
    environ = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "train_grpo.py", "--resume", "\u00fcbung"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
    )
    (line,) = done.stderr.decode().splitlines()
    assert done.returncode == 2
    assert "locale" in line


LAUNCHER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "from command_line import *; repeat_after_launcher('the last words')"])
sys.exit("a traceback")
"""


@pytest.mark.parametrize("launcher", [[], ["TORCHELASTIC_RUN_ID"], ["ACCELERATE_MIXED_PRECISION"]])
def test_below_the_traceback_of_a_launcher_stands_what_the_user_can_do(launcher):
    environ = {name: value for name, value in os.environ.items() if name not in SET_BY_LAUNCHERS}
    environ |= dict.fromkeys(launcher, "x")
    # This waits for the end of all processes that write to stderr.
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert done.stderr.splitlines() == ["a traceback", *(["the last words"] if launcher else [])]


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


def test_timm_does_not_bring_wandb_along_which_can_be_imported_afterwards():
    program = "import sys, vla.vision; assert 'wandb' not in sys.modules; import wandb"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=300)


def test_a_python_without_the_packages_says_how_to_use_the_environment():
    command = [sys.executable, "-S", str(ROOT / "eval.py"), "--help"]  # -S: no installed packages
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
    assert "source .venv/bin/activate" in refused.stderr


@pytest.mark.parametrize(
    "module",
    [
        "train_grpo",
        "eval",
        "experiment.report",
        "vla.merge",
        "workshop.sft",
    ],
)
def test_help_and_wrong_flags_are_answered_without_heavy_imports(module):
    helped = run(module, "--help")
    assert helped.returncode == 0, helped.stderr
    assert helped.stdout.splitlines()[-1] == "imported:"
    refused = run(module, "--no-such-flag")
    assert (refused.returncode, refused.stdout) == (2, "imported:\n")
    assert len(refused.stderr.splitlines()) == 1
