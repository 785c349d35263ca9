"""No damage of a small file ends in a traceback: what reads it works, or raises BadInput.

The damages are random, with seeds that never change. `DAMAGES=25 pytest tests/test_damaged_files.py` tries 25 of each
file, more than 200 in all; without the variable there are 5.
"""

import contextlib
import json
import os
import random
import shutil
import string
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from configs.cli import parse_train
from contracts import BadInput
from experiment import report
from experiment.results import check_comparable, read_results, write_results
from experiment.results_table import comparison_table, parts_of, results_table
from experiment.run_files import CONFIG_FILE, METRICS_FILE
from experiment.stored_run import read_run, read_training, was_trained_on
from rl.selfcheck import attention_probe, image_probe, made_up_observation
from tests.foreign_files import record, write_lerobot
from tests.small_checkpoint import load_policy
from tests.stored_runs import ROWS, SETTINGS, store, store_episodes
from tests.test_results import GREEDY, KEYS, TASKS, results_with
from vla.preprocessing import synthetic_observations
from workshop.sft_data import read_episodes

NUM_DAMAGES = int(os.environ.get("DAMAGES", "5"))
WRONG_VALUES: list[object] = [
    None,
    True,
    0,
    -1,
    7,
    100_000,
    10**30,
    10**400,
    0.5,
    -1e300,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../x",
    "\ud800",
    "a\nb",
    [],
    ["x"],
    [[1], [2]],
    {},
    {"x": {"y": []}},
]


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The content of a file with one damage."""
    is_json = content.lstrip().startswith(b"{")
    if is_json and rng.random() < 0.7:
        return _with_wrong_json(content, rng)
    place = rng.randrange(len(content))
    return rng.choice(
        [
            b"",
            content[:place],
            content[:place] + rng.randbytes(3) + content[place + 3 :],
            content[:place] + rng.choice(string.printable).encode() + content[place + 1 :],
            b"\xef\xbb\xbf" + content,
            b"[" * 100_000,
            b"null",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            bytes(1000),
        ]
    )


def _with_wrong_json(content: bytes, rng: random.Random) -> bytes:
    """Change one value, somewhere in one of the JSON objects that the lines hold, or in the one that they are."""
    try:
        lines = [json.loads(content)]
    except ValueError:
        lines = [json.loads(line) for line in content.splitlines()]
    container, key = rng.choice([place for line in lines for place in _places(line)])
    damage = rng.choice(("replace", "replace", "delete", "rename"))
    if damage == "replace":
        container[key] = rng.choice(WRONG_VALUES)
    else:
        value = container.pop(key)
        if damage == "rename" and isinstance(container, dict):
            container[f"{key}_"] = value
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _places(value: object) -> Iterator[tuple]:
    """(container, key or index) of every value in a JSON value."""
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, child in items:
        yield value, key
        yield from _places(child)


def check(folder: Path, name: str, read: Callable[[], object]) -> None:
    """Damage a file, again and again, and read it. Only BadInput may be raised, which names the file or its folder."""
    path = folder / name
    whole = path.read_bytes()
    read()
    for seed in range(NUM_DAMAGES):
        path.write_bytes(damaged(whole, random.Random(f"{path.name} {seed}")))
        problem = ""
        try:
            read()
        except BadInput as refusal:
            problem = str(refusal)
        except Exception as error:
            raise AssertionError(f"damage {seed} of {path}: {path.read_bytes()[:300]!r}") from error
        assert problem == "" or str(folder) in problem, f"damage {seed} of {path}"
        path.write_bytes(whole)


@pytest.fixture
def checkpoint(small, tmp_path) -> Path:
    """A checkpoint with an index, whose statistics and weights stand in files of their own."""
    folder = shutil.copytree(small, tmp_path / "checkpoint")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = load_policy(small).info.weights
    index = {
        "metadata": {"total_size": 1},
        "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors"),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def use(folder: Path) -> None:
    """Load a policy, check it as every program does, and let it decide as in a simulator with two cameras."""
    policy = load_policy(folder, action_dim=7)
    attention_probe(policy, made_up_observation(policy))
    image_probe(policy, made_up_observation(policy))
    observations = synthetic_observations(2, policy.statistics.proprio, count=1)
    assert np.isfinite(policy.act(observations).actions).all()


@pytest.mark.parametrize(
    "name",
    ["config.json", "dataset_statistics.json", "preprocessor_config.json", "model.safetensors.index.json"],
)
def test_files_of_a_checkpoint(name, checkpoint):
    check(checkpoint, name, lambda: use(checkpoint))


def test_config_of_an_adapter(small, tmp_path):
    load_policy(small).save_adapter(tmp_path / "adapter")
    check(tmp_path / "adapter", "adapter_config.json", lambda: use(tmp_path / "adapter"))


def test_results_of_an_evaluation(tmp_path):
    path = tmp_path / "results.json"
    write_results(path, results_with("110100"))
    ours = results_with("011100")
    parts = parts_of(TASKS, KEYS)

    def read() -> None:
        before = read_results(path)
        with contextlib.suppress(BadInput):
            check_comparable(SETTINGS, before.settings, str(path))
        results_table(before, [GREEDY], parts)
        comparison_table(before, ours, [GREEDY], parts)

    check(tmp_path, path.name, read)


@pytest.mark.parametrize("name", [METRICS_FILE, CONFIG_FILE, "evaluations/step_0.json"])
def test_files_of_a_run(name, tmp_path):
    run = store(tmp_path / "run", ROWS)
    store_episodes(run, 0, student="101", teacher="111")
    store_episodes(run, 300, student="111")

    def read() -> None:
        training = read_training(run / "checkpoints" / "step_300")
        assert training is not None
        was_trained_on(training, "libero_spatial", 0, 3)
        report.write_report(read_run(run))
        parse_train(["--resume", str(run)])

    check(run, name, read)


@pytest.mark.parametrize(
    "name",
    [
        "meta/info.json",
        "meta/tasks.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "data/chunk-000/file-000.parquet",
    ],
)
def test_files_of_a_lerobot_dataset(name, tmp_path):
    folder = write_lerobot(tmp_path / "libero", [record(0), record(1)])
    check(folder, name, lambda: read_episodes([folder], num_images=2, image_size=32))
