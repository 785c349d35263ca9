"""How a run ends: its log says why, and what the user can repair is one line."""

import os
import signal

import pytest
import torch

from command_line import STOP_SIGNALS
from configs.config import TrainConfig
from configs.sections import RunConfig
from contracts import BadInput
from experiment.interrupts import interruptible, until_the_end
from experiment.run_folder import Run
from experiment.stored_run import LOG_FILE
from tests.stored_runs import ROWS, store


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    run = Run(folder, TrainConfig(run=RunConfig(wandb_mode="disabled")))
    yield run
    run.close()


def end_with(run: Run, reason: BaseException) -> tuple[BaseException, str]:
    """What is raised when `reason` ends the run, and the run's log."""
    with pytest.raises(BaseException) as caught, until_the_end(run):
        raise reason
    time_and_text = (run.folder / LOG_FILE).read_text().split("  ", 1)
    return caught.value, time_and_text[1]


def test_the_log_has_the_traceback_of_a_bug_and_one_line_for_a_full_gpu(run):
    raised, logged = end_with(run, ValueError("a bug"))
    assert isinstance(raised, ValueError)
    assert "Traceback" in logged
    (run.folder / LOG_FILE).unlink()
    raised, logged = end_with(run, torch.OutOfMemoryError("CUDA out of memory\nand more"))
    assert isinstance(raised, BadInput)
    assert logged == f"{raised}\n"


def test_the_report_of_a_stopped_run_has_all_its_updates(run):
    store(run.folder, ROWS)
    (run.checkpoints / "latest").write_text("step_1")
    end_with(run, KeyboardInterrupt())
    assert f"{ROWS[-1]['global_step']:,} of" in (run.folder / "report" / "index.html").read_text()


def test_a_run_whose_end_says_how_to_go_on_is_not_told_to_go_on_as_it_was(run, caplog):
    store(run.folder, ROWS)
    (run.checkpoints / "latest").write_text("step_1")
    for reason, is_told in ((BadInput("--resume would repeat it"), False), (KeyboardInterrupt(), True)):
        caplog.clear()
        end_with(run, reason)
        assert (f"--resume {run.folder}" in caplog.text) == is_told


def test_a_signal_where_python_swallows_exceptions_still_interrupts():
    class Deleted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def wait() -> None:
        Deleted()
        signal.pause()  # until it is raised again

    with pytest.raises(KeyboardInterrupt), interruptible():
        wait()


def test_the_second_signal_kills():
    child = os.fork()
    if child == 0:
        with interruptible():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGINT)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGINT


@pytest.mark.parametrize("stop_signal", STOP_SIGNALS)
def test_every_stop_signal_interrupts_unless_it_is_ignored(stop_signal):
    before = signal.signal(stop_signal, lambda *_: None)
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(stop_signal)
    signal.signal(stop_signal, signal.SIG_IGN)  # as nohup ignores SIGHUP
    with interruptible():
        signal.raise_signal(stop_signal)
    signal.signal(stop_signal, before)
