"""Two processes that train together against one process with the same data (tests/together.py says what they do)."""

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl.launcher import ranks_to_start, run_as_ranks
from rl.ranks import ALONE
from tests import together
from tests.end_to_end.test_ranks import free_port
from tests.fakes import assert_same_bits

ROOT = Path(__file__).parents[1]
UPDATES = ["uneven", "one row each", "poisoned", "one rank short of memory"]


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    port = free_port()
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=together.main, args=(rank, port, folder)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process, exit_code in zip(processes, (0, 9), strict=True):
        process.join()
        assert process.exitcode == exit_code
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone() -> dict:
    return together.results(ALONE)


# updates


@pytest.mark.parametrize("case", UPDATES)
def test_an_update_is_that_of_one_process_with_the_same_data_and_the_same_bits_on_all_ranks(
    both, alone, case
):
    first, second, expected = both[0][case], both[1][case], alone[case]
    torch.testing.assert_close(first["parameters"], expected["parameters"])
    assert_same_bits(first["parameters"], second["parameters"])
    assert first["metrics"] == second["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-7)


def test_active_rows_are_divided(both):
    """5 of 8 rows in each of 2 epochs, and once 4 rows on each rank for the statistics."""
    assert [rank["uneven"]["rows_run"] for rank in both] == [2 * 3 + 4, 2 * 2 + 4]
    assert [rank["one row each"]["rows_run"] for rank in both] == [2 * 5 + 4, 4]
    assert both[1]["one row each"]["metrics"]["train/optimizer_steps"] == 10


def test_a_gradient_that_one_rank_finds_broken_is_skipped_by_all(both):
    for results_of_rank in both:
        metrics = results_of_rank["poisoned"]["metrics"]
        assert (metrics["train/skipped_steps"], metrics["train/optimizer_steps"]) == (1, 3)
        assert all(torch.isfinite(p).all() for p in results_of_rank["poisoned"]["parameters"])


# rollouts and evaluations


def test_dynamic_sampling_keeps_the_same_groups_on_all_ranks(both):
    assert both[0]["dynamic sampling"] == both[1]["dynamic sampling"]
    played, kept = both[0]["dynamic sampling"]
    assert 0 < len(kept) < len(played)
    assert len({episode.index for episode, *_ in played}) == len(played)


def test_an_evaluation_is_divided_and_its_result_is_that_of_one_process(both, alone):
    first, second = both[0]["evaluation"], both[1]["evaluation"]
    assert first["episodes"] == second["episodes"] == alone["evaluation"]["episodes"]
    assert (first["played"], second["played"]) == (8, 7)


# faults


def test_one_differing_bit_is_found(both):
    assert [rank["drift"] for rank in both] == [True, True]


def test_a_rank_that_dies_ends_the_others(both):
    assert both[0]["lost"]


# starting


def python(code: str) -> list[str]:
    return [sys.executable, "-c", f"import os, signal, sys\nrank = os.environ['RANK']\n{code}"]


@pytest.mark.usefixtures("own_signals")
def test_a_rank_that_is_killed_ends_those_that_hang_and_its_code_is_returned():
    kill = "if rank == '1': os.kill(os.getpid(), signal.SIGKILL)"
    assert run_as_ranks(python(f"{kill}\nsignal.pause()"), 2) == 128 + 9


@pytest.mark.usefixtures("own_signals")
def test_signals_reach_every_rank(fifo):
    """Rank 1 interrupts the launcher as a terminal would, once both ranks heed signals."""
    heed = "signal.signal(signal.SIGINT, lambda *_: sys.exit(130))"
    meet = f"open({str(fifo)!r}, 'w' if rank == '0' else 'r').close()"  # each end waits for the other
    ask = "if rank == '1': os.kill(os.getppid(), signal.SIGINT)"
    assert run_as_ranks(python(f"{heed}\n{meet}\n{ask}\nsignal.pause()"), 2) == 130


def test_ranks_do_not_outlive_a_killed_launcher():
    command = python("os.write(1, (rank + chr(10)).encode()); signal.pause()")
    code = f"from rl.launcher import run_as_ranks\nrun_as_ranks({command!r}, 2)"
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert sorted(launcher.stdout.readline() for _ in range(2)) == ["0\n", "1\n"]
    launcher.kill()
    assert launcher.communicate(timeout=60)[0] == ""  # it ends when nobody is left who could write


def test_data_parallel_starts_a_rank_per_gpu_unless_it_is_one_already(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert ranks_to_start() == 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert ranks_to_start() == 4
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks_to_start() == 0
