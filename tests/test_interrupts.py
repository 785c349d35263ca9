"""An interrupt ends the program wherever it arrives, also where a library has made another exception of it."""

import ctypes

import pytest

from envs.libero import EnvSpec, LiberoEnv
from interrupts import interruptible
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


class Interrupted:
    @classmethod
    def from_param(cls, value):
        raise KeyboardInterrupt


def call_of_a_c_function():
    """As OpenGL's: interrupted while ctypes converts an argument."""
    function = ctypes.CDLL(None).abs
    function.argtypes = [Interrupted]
    function(1)


DISGUISED = [interrupted_import, import_above, call_of_a_c_function]


@pytest.mark.parametrize("interrupted", DISGUISED)
def test_it_is_no_fault_of_the_simulator(monkeypatch, interrupted):
    env = LiberoEnv(EnvSpec("libero_spatial", (0,)), 0)
    monkeypatch.setattr(env, "_build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        env.reset(0)


@pytest.mark.parametrize("interrupted", DISGUISED)
def test_it_ends_the_program_in_good_order(interrupted):
    with pytest.raises(KeyboardInterrupt), interruptible():
        interrupted()
    with pytest.raises(ImportError, match="no codec"), interruptible():
        raise ImportError("no codec")


@pytest.mark.parametrize("interrupted", DISGUISED)
def test_it_is_no_failure_of_what_watches_a_run(interrupted):
    with pytest.raises(KeyboardInterrupt), never_fatal("the video could not be written"):
        interrupted()
    with never_fatal("the video could not be written"):
        raise ImportError("no codec")


def test_what_fails_in_the_clearing_up_after_it_does_not_end_the_clearing_up(tmp_path):
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with never_fatal("the report could not be written"):
            (tmp_path / "no folder" / "report").write_text("")
