"""The programs in benchmarks/ say in one line what is wrong, as the others do."""

import signal
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks import eyes, instructions, physics
from contracts import BadInput
from envs.env import ChunkResult

FOLDER = Path(__file__).parents[1] / "benchmarks"
# kills.py starts itself again in order to be killed.
PROGRAMS = [
    path for path in FOLDER.glob("*.py") if "__main__" in path.read_text() and path.name != "kills.py"
]


@pytest.mark.parametrize(
    ("program", "flags"),
    [
        ("gpu", []),
        ("data_parallel", ["checkpoints/tiny-libero-spatial"]),
        ("smaller_card", ["23.5", "true"]),
        ("full_size", ["new"]),
    ],
)
def test_without_a_gpu_what_measures_one_is_refused(program, flags, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers would stay
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="torch sees no"):
        import_module(f"benchmarks.{program}").main(flags)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_every_program_ends_in_a_line_where_a_user_can_repair_something(path):
    assert f'sys.exit(main_guard("benchmarks.{path.stem}", main))' in path.read_text()


@pytest.mark.parametrize(
    ("program", "flags"),
    [
        ("physics", ["--num-envs", "0"]),
        ("policy_physics", ["--checkpoint", "POLICY", "--episodes", "-1"]),
        ("rollout", ["--workers", "0"]),
        ("instructions", ["--checkpoint", "POLICY", "--num-states", "0"]),
        ("eyes", ["--checkpoint", "POLICY", "--placements", "0"]),
        ("before_after", ["--checkpoint", "POLICY", "--adapter", "TRAINED", "--num-states", "0"]),
        ("data_parallel", ["POLICY", "--iterations", "0"]),
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_runs(program, flags):
    with pytest.raises(BadInput, match=f"{flags[-2]} must be above 0"):
        import_module(f"benchmarks.{program}").main(flags)


class FailingEnv:
    """A simulator that fails at every reset. Like the real one it then has nothing to read."""

    num_init_states = 50

    def reset(self, start, observe=True) -> ChunkResult:
        return ChunkResult(done=True, error="the table fell over")


def test_an_episode_whose_simulator_fails_does_not_end_a_benchmark(monkeypatch):
    monkeypatch.setattr(physics, "open_env", lambda task: nullcontext(FailingEnv()))
    task = physics.Task("libero_spatial", 0)
    assert physics.play_expert(task, range(2)) == []
    assert physics.measure_deviation(task) == physics.NOT_MEASURED
    assert eyes.approach(None, FailingEnv(), seed=0, moved_cm=8) == eyes.Approach()
    told = instructions.Task(1, "push the plate", [])
    assert instructions.play(None, FailingEnv(), 0, told, told) == (False, False)
