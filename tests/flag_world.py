"""train_grpo.py and eval.py in a world where a whole run takes a second: only the simulator is not the real one.

Policy (a small checkpoint), rollouts, updates, evaluations, records and checkpoints are the program's own. What a
command line did is an `Outcome`, whose parts can be compared by name.
"""

from __future__ import annotations

import io
import json
import logging
import re
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import preflight
from contracts import Observation
from envs import pool as pools
from envs.libero import MAX_ENV_STEPS, ChunkResult, EnvSpec
from envs.pool import Pool, make_pool
from errors import BadInput, TimeIsUp
from rl import evaluation_files, report, run
from tests.test_wandb_log import FakeRun
from vla import openvla_oft
from vla.policy import Policy

MOVES = 5  # env steps with a positive first action that make a success, and with a negative one a failure
FADING = 49  # an initial state that brings success whatever is done, but in its first three episodes only
LIMIT = 16  # env steps of an episode, unless --max-env-steps says otherwise


@dataclass(frozen=True)
class Case:
    """`changed` sets one flag. Beside `given`, which both runs have, it makes a difference in `seen` of the outcome."""

    changed: str
    seen: str
    given: str = ""

    @property
    def flag(self) -> str:
        """The field's name: `--no-warmup` is warmup."""
        return self.changed.split()[0].removeprefix("--").removeprefix("no-").replace("-", "_")


@dataclass
class Noticed:
    """What the stand-ins and wrappers of one command line saw."""

    started: list[tuple[int, int]] = field(default_factory=list)  # (task, initial state) of every episode
    batches: list[int] = field(default_factory=list)  # observations of every pass through the policy
    compiled: list[str] = field(default_factory=list)
    recomputed: list[str] = field(default_factory=list)
    wandb: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)  # what was logged or printed
    config: dict[str, Any] = field(default_factory=dict)  # what the flags came to: name -> value


class PlayEnv:
    """Noise for pictures; an episode ends as soon as MOVES of its actions have gone to the right, or to the left."""

    def __init__(self, noticed: Noticed, spec: EnvSpec, task_id: int):
        self.noticed, self.spec, self.task_id = noticed, spec, task_id

    def reset(self, init_state_id: int, seed: int = 0, record: bool = False) -> ChunkResult:
        self.noticed.started.append((self.task_id, init_state_id))
        self.rng = np.random.default_rng([self.task_id, init_state_id])
        self.limit = self.spec.max_env_steps or LIMIT
        self.fading = self.noticed.started.count((self.task_id, FADING)) if init_state_id == FADING else None
        self.record, self.env_steps, self.right = record, 0, 0
        return self.result(executed=0)

    def step_chunk(self, actions: np.ndarray) -> ChunkResult:
        executed = 0
        for action in actions[: self.limit - self.env_steps]:
            executed += 1
            self.right += int(action[0] > 0)
            if MOVES in (self.right, self.env_steps + executed - self.right):
                break
        self.env_steps += executed
        return self.result(executed)

    def result(self, executed: int) -> ChunkResult:
        done = self.env_steps >= self.limit or MOVES in (self.right, self.env_steps - self.right)
        success = done and (self.right == MOVES if self.fading is None else self.fading <= 3)
        images = self.rng.integers(0, 255, (self.spec.num_images, 256, 256, 3), dtype=np.uint8)
        observation = None if done else Observation(images, self.rng.normal(size=8), "do it")
        frames = [images[0]] * executed if self.record else []
        return ChunkResult(observation, success, executed, self.env_steps, done, frames=frames)

    def close(self) -> None:
        pass


class TakingTurns:
    """In the place of worker processes: `ready` brings two results at once, and more only to those who wait."""

    def __init__(self, spec: EnvSpec, num_envs: int, make_env: Any, prepare: Any):
        self.num_slots, self.restarts, self.busy = num_envs, 0, []
        self.slots = [Pool(spec, make_env, prepare) for _ in range(num_envs)]

    def reset(self, slot: int, *start: int, **options: Any) -> None:
        self.slots[slot].reset(0, *start, **options)
        self.busy.append(slot)

    def step(self, slot: int, actions: np.ndarray) -> None:
        self.slots[slot].step(0, actions)
        self.busy.append(slot)

    def ready(self, timeout_s: float | None = None) -> list[tuple[int, ChunkResult]]:
        count = 2 if timeout_s is None else min(1, timeout_s)
        done = [self.busy.pop(0) for _ in range(min(len(self.busy), int(count)))]
        return [(slot, self.slots[slot].ready()[0][1]) for slot in done]

    def __enter__(self) -> TakingTurns:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


@dataclass(frozen=True)
class Outcome:
    """What a command line has done."""

    home: Path  # the folder that it ran in
    ended: str  # the message with which it stopped before its end
    noticed: Noticed

    @cached_property
    def files(self) -> list[str]:
        """All files, without the time in the names of run folders."""
        names = (str(path.relative_to(self.home)) for path in self.home.rglob("*") if path.is_file())
        return sorted(re.sub(r"\d{8}-\d{6}|\d{8,}", "TIME", name) for name in names)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for path in self.home.rglob("metrics.jsonl") for line in path.open()]

    @cached_property
    def weights(self) -> list[str]:
        """The trained tensors."""
        adapters = [load_file(path) for path in self.home.glob("*/*/checkpoints/latest/adapter_model.safetensors")]
        return [f"{name} {w.tolist()}" for adapter in adapters for name, w in adapter.items()]

    @cached_property
    def best(self) -> list[str]:
        """What is known about the best checkpoint."""
        paths = self.home.glob("*/*/checkpoints/best/metadata.json")
        return [key for path in paths for key in json.loads(path.read_text())]

    @cached_property
    def results(self) -> dict[str, Any]:
        """The results file of eval.py."""
        return json.loads(next(self.home.rglob("*.json")).read_text())

    @cached_property
    def settings(self) -> list[str]:
        """What the results file says of how they were played."""
        return [str(value) for value in self.results["settings"].values()]

    @cached_property
    def played(self) -> list[tuple[str, int, int, bool, int]]:
        """The episodes in it, and how they ended."""
        names = ("task_suite", "task_id", "init_state_id", "success", "env_steps")
        return [tuple(episode[name] for name in names) for episode in self.results["episodes"]]

    def part(self, name: str) -> Any:
        """A part by name; `name: text` is whether the part contains the text, `rollout/x` the values of a metric."""
        name, _, text = name.partition(": ")
        if text:
            return any(text in entry for entry in self.part(name))
        if name == "ended":
            return [self.ended]
        if "/" in name or name == "global_step":
            return [row.get(name) for row in self.rows]
        return getattr(self, name) if hasattr(Outcome, name) else getattr(self.noticed, name)


class World:
    """Runs command lines, each in a folder of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.outcomes: dict[tuple[str, ...], Outcome] = {}

    def run(self, program: types.ModuleType, argv: Sequence[str]) -> Outcome:
        """What the command line did; the same one is run once."""
        key = (program.__name__, *argv)
        if key not in self.outcomes:
            home = self.folder / f"run_{len(self.outcomes):03}"
            home.mkdir()
            self.outcomes[key] = run_in(home, program, argv)
        return self.outcomes[key]


def run_in(home: Path, program: types.ModuleType, argv: Sequence[str]) -> Outcome:
    noticed, ended = Noticed(), ""
    with pytest.MonkeyPatch.context() as patch, listening(noticed.log):
        patch.chdir(home)
        put_in_place(patch, program, noticed)
        try:
            program.main(list(argv))
        except (BadInput, TimeIsUp) as reason:
            ended = str(reason)
    return Outcome(home, ended, noticed)


def put_in_place(patch: pytest.MonkeyPatch, program: types.ModuleType, noticed: Noticed) -> None:
    """The small simulator in place of the real one, and wrappers that take notes."""
    patch.setattr(program, "make_pool", partial(make_pool, make_env=partial(PlayEnv, noticed)))
    patch.setattr(pools, "WorkerPool", TakingTurns)
    for suite in MAX_ENV_STEPS:
        patch.setitem(MAX_ENV_STEPS, suite, LIMIT)
    # What costs most of the time and no flag reaches: lists of packages, videos, the report, a process that renders.
    for module, costly in ((run, "provenance"), (evaluation_files, "write_video"), (report, "write_report")):
        patch.setattr(module, costly, lambda *_: {})
    patch.setattr(preflight, "check_rendering", lambda _: "not asked for")
    parser = "parse_command" if hasattr(program, "parse_command") else "parse_eval"
    parse, passes, recompute = getattr(program, parser), Policy.chunk_outputs, openvla_oft.checkpoint

    def parsed(argv: Sequence[str]) -> Any:
        command = parse(argv)
        noticed.config.update(flat(asdict(command)))
        return command

    def counted(policy: Policy, observations: Sequence[Any], *rest: Any, **more: Any) -> Any:
        noticed.batches.append(len(observations))
        return passes(policy, observations, *rest, **more)

    patch.setattr(program, parser, parsed)
    patch.setattr(Policy, "chunk_outputs", counted)
    patch.setattr(
        openvla_oft, "checkpoint", lambda block, *a, **k: (noticed.recomputed.append("x"), recompute(block, *a, **k))[1]
    )
    patch.setattr(torch, "compile", lambda block: (noticed.compiled.append(block.__name__), block)[1])
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr("wandb.init", lambda **given: (noticed.wandb.update(given), FakeRun())[1])


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of all sections of a configuration together."""
    parts = [flat(value) if isinstance(value, dict) else {name: value} for name, value in config.items()]
    return {name: value for part in parts for name, value in part.items()}


@contextmanager
def listening(lines: list[str]) -> Iterator[None]:
    """Append what the program logs and prints."""
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("train")
    logger.addHandler(handler)
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        logger.removeHandler(handler)
        lines += printed.getvalue().splitlines()
