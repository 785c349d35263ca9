"""An interrupt ends the program wherever it arrives, also where a library has made another exception of it."""

import pytest

from envs.libero import EnvSpec, LiberoEnv
from rl.never_fatal import never_fatal


def interrupted_import():
    """As mujoco's modules: what is not an ImportError becomes one."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as interrupt:
        raise ImportError("initialization failed") from interrupt


def import_above():
    try:
        interrupted_import()
    except ImportError as error:
        raise ImportError("initialization failed") from error


def test_it_is_no_fault_of_the_simulator(monkeypatch):
    env = LiberoEnv(EnvSpec("libero_spatial", (0,)), 0)
    monkeypatch.setattr(env, "_build", import_above)
    with pytest.raises(KeyboardInterrupt):
        env.reset(0)


def test_it_is_no_failure_of_what_watches_a_run():
    with pytest.raises(KeyboardInterrupt), never_fatal("the video could not be written"):
        interrupted_import()
    with never_fatal("the video could not be written"):
        raise ImportError("no codec")


def test_what_fails_in_the_clearing_up_after_it_does_not_end_the_clearing_up(tmp_path):
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with never_fatal("the report could not be written"):
            (tmp_path / "no folder" / "report").write_text("")
