"""Train on the simulator of docs/OWN_SIMULATOR.md, which is built at once and costs nothing.

python -m tests.end_to_end.reach ARGV...   as train_grpo.py ARGV...
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import train_grpo
from command_line import main_guard
from contracts import Observation
from envs import pool
from envs.env import Env, EnvSpec

PAGE = Path(__file__).parents[2] / "docs" / "OWN_SIMULATOR.md"


def load_env_class() -> type[Env]:
    """The class that the page shows."""
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict[str, type[Env]] = {}
    exec(source, names)
    return names["ReachEnv"]


class ReachEnv(load_env_class()):  # type: ignore[misc]
    """The page's env, with a state for critics."""

    def observation(self) -> Observation:
        state = np.concatenate([self.hand, self.goal], dtype=np.float32)
        return replace(super().observation(), state=state)


def make_env(spec: EnvSpec, task_id: int) -> Env:
    return ReachEnv(spec, task_id)


def main(argv: Sequence[str]) -> None:
    pool.make_env = make_env
    train_grpo.main(argv)


if __name__ == "__main__":
    from tests.end_to_end import reach  # worker processes find `make_env` in this module, not in __main__

    sys.exit(main_guard("train_grpo.py", reach.main, knows_ranks=True))
