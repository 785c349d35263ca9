"""Every program answers --help fast, and tells its shell how it ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import main_guard
from contracts import BadInput, TimeIsUp

ROOT = Path(__file__).parents[1]


# exit codes


def run_main(monkeypatch, main, knows_ranks: bool = False) -> int:
    monkeypatch.setattr(sys, "argv", ["program.py"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers would stay
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # so that the changed one is taken back
    return main_guard("program.py", main, knows_ranks)


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
    assert run_main(monkeypatch, raising(KeyboardInterrupt()), knows_ranks=True) == 130
    assert capsys.readouterr() == ("", "program.py, rank 1: interrupted\n")


def test_a_locale_that_is_not_utf_8_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "gbk")
    assert run_main(monkeypatch, lambda argv: pytest.fail("it runs")) == 2
    assert "LC_ALL" in capsys.readouterr().err


def test_torchrun_may_start_only_a_program_that_knows_ranks(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_main(monkeypatch, raising(ZeroDivisionError())) == 2
    assert "torchrun" in capsys.readouterr().err


# what containers and clusters do to the environment


def test_a_process_that_is_alone_is_the_only_rank_whatever_the_cluster_says(monkeypatch):
    for name, value in {"WORLD_SIZE": "1", "RANK": "3", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    seen = []
    names = {"WORLD_SIZE", "RANK", "LOCAL_RANK"}
    assert run_main(monkeypatch, lambda _: seen.append(names & set(os.environ))) == 0
    assert seen == [set()]


ENVIRONMENT = """
import getpass, pathlib, pwd, sys

def no_entry(*_):
    raise KeyError("uid not found")

pwd.getpwuid = no_entry
from command_line import main_guard
from envs.cache import cache_dir

def main(_):
    print(getpass.getuser(), pathlib.Path.home(), cache_dir(), sep="\\n")

sys.exit(main_guard("program.py", main))
"""


def test_without_home_and_an_entry_in_passwd_a_program_runs(tmp_path):
    left_out = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME", "VLA_GRPO_CACHE")
    environ = {name: value for name, value in os.environ.items() if name not in left_out}
    environ |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "PYTHONUSERBASE": str(tmp_path)}
    command = [sys.executable, "-c", ENVIRONMENT]
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    name, home, cache = ended.stdout.splitlines()
    assert name
    assert Path(home).is_absolute()
    assert Path(cache).is_absolute()
    assert not (tmp_path / "~").exists()


# the start


PROGRAM = """
import runpy, sys
sys.argv[1:] = ["--help"]
try:
    runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
finally:
    heavy = {{"torch", "transformers", "timm", "peft", "mujoco", "robosuite", "libero", "wandb", "matplotlib", "scipy"}}
    print("imported:", *sorted(heavy & set(sys.modules)))
"""


@pytest.mark.parametrize("module", ["train_grpo", "eval"])
def test_help_is_answered_without_heavy_imports(module):
    program = PROGRAM.format(module=module)
    helped = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert helped.returncode == 0, helped.stderr
    assert helped.stdout.splitlines()[-1] == "imported:"


def test_a_python_without_the_packages_says_how_to_use_the_environment():
    command = [sys.executable, "-S", str(ROOT / "eval.py"), "--help"]  # -S: no installed packages
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
    assert "source .venv/bin/activate" in refused.stderr
