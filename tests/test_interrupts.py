"""An interrupt ends the program wherever it arrives, also where a library has made another exception of it."""

import ctypes
import importlib
import signal
import sys
import weakref

import pytest

from envs.assets import find_assets
from envs.libero import EnvSpec, LiberoEnv
from interrupts import finished_first, interruptible
from rl.never_fatal import never_fatal


def interrupted_library():
    """What is not an error of its own becomes one."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as interrupt:
        raise ImportError("initialization failed") from interrupt


def library_above():
    try:
        interrupted_library()
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


DISGUISED = [interrupted_library, library_above, call_of_a_c_function]


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


def lines_run(interrupted):
    """Those of a program that calls `interrupted` between two of its lines."""
    reached = []

    def program():
        reached.append("before")
        interrupted()
        reached.append("after")

    with pytest.raises(KeyboardInterrupt), interruptible():
        program()
    return reached


def interrupt():
    signal.raise_signal(signal.SIGTERM)


def import_a_module():
    importlib.invalidate_caches()
    import interrupts_itself  # noqa: F401


def call_a_destructor():
    class Dying:
        def __del__(self):
            interrupt()

    Dying()


def call_back_of_a_weak_reference():
    class Dying:
        pass

    dying = Dying()
    reference = weakref.ref(dying, lambda _: interrupt())
    del dying
    assert reference() is None


@pytest.fixture
def module_that_interrupts_itself(tmp_path, monkeypatch):
    """Within a further import, where an exception would get lost."""
    (tmp_path / "interrupts_itself.py").write_text("import interrupts_itself_within\nwhole = True\n")
    (tmp_path / "interrupts_itself_within.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGTERM)\n    whole = True\nexcept BaseException: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("interrupts_itself", "interrupts_itself_within"):
        sys.modules.pop(name, None)


def test_an_import_is_finished_first(module_that_interrupts_itself):
    assert lines_run(import_a_module) == ["before"]
    assert sys.modules["interrupts_itself"].whole
    assert sys.modules["interrupts_itself_within"].whole


def test_what_must_not_stay_half_done_is_finished_first():
    done = []

    @finished_first
    def build():
        interrupt()
        done.append("all of it")

    assert lines_run(build) == ["before"]
    assert done == ["all of it"]


def test_a_simulator_is_there_or_is_not_when_an_interrupt_is_dealt_with(monkeypatch):
    """Half of one could not be closed."""
    monkeypatch.setattr("envs.libero.find_assets", lambda assets: interrupt() or find_assets(assets))
    env = LiberoEnv(EnvSpec("libero_spatial", (0,)), 0)
    assert lines_run(lambda: env.reset(0)) == ["before"]
    assert env.domain.sim.data.time == 0.0
    env.close()


def test_a_simulator_that_is_being_closed_is_closed_whole():
    closed = []

    class Closing:
        def close(self):
            interrupt()
            closed.append("all of it")

    env = LiberoEnv(EnvSpec("libero_spatial", (0,)), 0)
    env._simulator = Closing()
    assert lines_run(env.close) == ["before"]
    assert closed == ["all of it"]


@pytest.mark.parametrize("call", [call_a_destructor, call_back_of_a_weak_reference])
def test_it_is_not_lost_where_python_cannot_raise(call, capsys):
    assert lines_run(call) == ["before"]
    assert capsys.readouterr().err == ""


def test_nothing_of_it_stays_behind(module_that_interrupts_itself):
    handlers, hook, trace = signal.getsignal(signal.SIGTERM), sys.unraisablehook, sys.gettrace()
    with pytest.raises(KeyboardInterrupt), interruptible():
        import_a_module()
    assert (signal.getsignal(signal.SIGTERM), sys.unraisablehook, sys.gettrace()) == (handlers, hook, trace)
