"""Readers of tasks, initial states, demonstrations and assets."""

import importlib.util
import json
import shutil
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np

from envs.assets import SUBFOLDERS, find_assets
from envs.bddl import read_problem
from envs.demos import Recipe, failed_attempts, keep_recipe
from envs.tasks import load_init_states, save_init_states
from envs.lowpoly.coverage import missing_assets
from envs.tasks import libero_root
from tests.demo_episodes import write_demos
from tests.fuzzing.model_readers import INSTRUCTION, Read
from vla.observation import PlainObservation, read_observations, write_observations
from vla.sft_data import read_episodes


@cache
def libero_reader() -> ModuleType:
    """LIBERO's own reader of BDDL files, which evaluates what stands in them, without the rest of its package."""
    spec = importlib.util.spec_from_file_location("bddl_utils", libero_root() / "envs" / "bddl_utils.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bddl(folder: Path) -> Read:
    folder.mkdir()
    shutil.copyfile(libero_root() / "bddl_files" / "libero_goal" / "turn_on_the_stove.bddl", folder / "own.bddl")
    libero = libero_reader()

    def read(folder: Path) -> None:
        read_problem(folder / "own.bddl")
        missing_assets(folder / "own.bddl")
        libero.robosuite_parse_problem(str(folder / "own.bddl"))

    return read


def init_states(folder: Path) -> Read:
    folder.mkdir()
    save_init_states(folder / "own.pruned_init", np.linspace(0, 1, 30).reshape(5, 6))
    original = next((libero_root() / "init_files" / "libero_goal").glob("*.pruned_init"))
    shutil.copyfile(original, folder / "libero.pruned_init")

    def read(folder: Path) -> None:
        for path in (folder / "own.pruned_init", folder / "libero.pruned_init"):
            assert np.isfinite(load_init_states(path)).all()

    return read


def demonstrations(folder: Path) -> Read:
    write_demos(folder, episodes=1)
    return lambda folder: read_episodes([folder], num_images=2, image_size=32, workers=1)


def demo_journal(folder: Path) -> Read:
    folder.mkdir()
    keep_recipe(folder / "recipe.json", Recipe())
    lines = [{"task_id": 0, "index": i, "outcome": ("success", "failure")[i % 2], "env_steps": 90} for i in range(4)]
    (folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def read(folder: Path) -> None:
        if (folder / "recipe.json").exists():
            keep_recipe(folder / "recipe.json", Recipe())
        failed_attempts(folder / "attempts.jsonl")

    return read


def observations(folder: Path) -> Read:
    folder.mkdir()
    images = np.zeros((2, 256, 256, 3), np.uint8)
    write_observations(folder / "sample_observations.npz", [PlainObservation(images, np.zeros(8), INSTRUCTION)] * 2)
    return lambda folder: read_observations(folder / "sample_observations.npz")


def asset_folder(folder: Path) -> Read:
    for name in SUBFOLDERS:
        (folder / name).mkdir(parents=True)
    return lambda folder: find_assets(str(folder))
