"""Build, reset and draw tasks of LIBERO-PRO and variants of LIBERO-Plus (requirements-benchmarks.txt).

python -m benchmarks.published_suites                   # one task of each of 16 suites, 20 variants of each category
python -m benchmarks.published_suites --pro-tasks 10    # all 160 tasks of LIBERO-PRO
Prints a line for every start. Exit code 1 if one fails, if a picture is empty, or if a variant does not change what its
category should: the picture of agentview (camera, noise), of both cameras (robot) or the instruction (language).
"""

import argparse
import sys
import time
from collections.abc import Sequence

import numpy as np

from command_line import main_guard
from contracts import Observation
from envs.assets import find_pack
from envs.env import EnvSpec, Start
from envs.libero import LiberoEnv
from envs.libero_plus import find_variants
from envs.rendering import MIN_CONTRAST
from envs.tasks import PRO_CHANGES, PUBLISHED_SUITES

MIN_DIFFERENCE = 0.3  # mean absolute difference of two pictures that are not of the same thing
# Language comes first, because its pictures are those of the unchanged task.
CATEGORIES = ("language", "camera", "robot", "noise")
CHANGED_PICTURES = {
    "language": [False, False],
    "camera": [True, False],
    "robot": [True, True],
    "noise": [True, False],
}


def start(env: LiberoEnv, init_state_id: int, label: str) -> Observation | None:
    """Begin an episode and print its line; returns its first observation, or None if it fails or shows nothing."""
    started = time.perf_counter()
    result = env.reset(Start(init_state_id))
    seconds = time.perf_counter() - started
    observation = result.observation
    contrast = 0.0 if observation is None else min(image.std() for image in observation.images)
    print(f"{label:24} task {env.task_id}  {seconds:5.1f} s  contrast {contrast:3.0f}  ", end="")
    print(result.error or env.instruction, flush=True)
    return observation if contrast >= MIN_CONTRAST else None


def check_pro(suite: str, task_id: int, assets: str) -> bool:
    """Start the first initial state of a task of LIBERO-PRO; returns whether that works."""
    env = LiberoEnv(EnvSpec(suite, (task_id,), assets=assets), task_id)
    observation = start(env, 0, suite)
    env.close()
    return observation is not None


def check_plus(suite: str, task_id: int, assets: str) -> dict[str, bool]:
    """Start one variant of each category of a task; returns whether it works and changes what it should."""
    env = LiberoEnv(EnvSpec(f"{suite}_plus", (task_id,), assets=assets), task_id)
    variants = find_variants(f"{suite}_plus", task_id)
    passed = {}
    unchanged = None
    for category in CATEGORIES:
        places = [place for place, variant in enumerate(variants) if variant.category == category]
        place = places[task_id * len(places) // 10]
        observation = start(env, place, f"{suite} {category}")
        unchanged = unchanged or observation
        passed[category] = False
        if observation is not None and unchanged is not None:
            difference = np.abs(observation.images.astype(int) - unchanged.images).mean(axis=(1, 2, 3))
            says_something_else = observation.instruction != env.files.instruction
            passed[category] = (difference > MIN_DIFFERENCE).tolist() == CHANGED_PICTURES[category]
            passed[category] &= says_something_else == (category == "language")
    env.close()
    return passed


def main(argv: Sequence[str]) -> None:
    """Read the flags and check the suites. Raises SystemExit with code 1 if one is not as it should be."""
    parser = argparse.ArgumentParser("benchmarks.published_suites", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--assets", default="official", help="official, or a folder with all models of LIBERO-PRO"
    )
    parser.add_argument("--pro-tasks", type=int, default=1, help="tasks of each suite of LIBERO-PRO")
    parser.add_argument(
        "--plus-tasks", type=int, default=5, help="tasks of each suite, with a variant a category"
    )
    arguments = parser.parse_args(argv)
    if not check_suites(arguments.assets, arguments.pro_tasks, arguments.plus_tasks):
        raise SystemExit(1)


def check_suites(assets: str, num_pro_tasks: int, num_plus_tasks: int) -> bool:
    """Check tasks of LIBERO-PRO and variants of LIBERO-Plus; returns whether all are as they should be."""
    print(find_pack(assets))
    suites = [f"{suite}_{change}" for suite in PUBLISHED_SUITES for change in PRO_CHANGES]
    pro = [check_pro(suite, task_id, assets) for suite in suites for task_id in range(num_pro_tasks)]
    task_ids = [10 * i // num_plus_tasks for i in range(num_plus_tasks)]
    plus = [check_plus(suite, task_id, assets) for suite in PUBLISHED_SUITES for task_id in task_ids]
    print(f"LIBERO-PRO: {sum(pro)} of {len(pro)} tasks")
    for category in CATEGORIES:
        print(f"LIBERO-Plus {category}: {sum(passed[category] for passed in plus)} of {len(plus)} variants")
    return all(pro) and all(all(passed.values()) for passed in plus)


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.published_suites", main))
