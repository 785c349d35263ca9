"""Print what a policy's decisions depend on: images, robot state, instruction.

    python -m benchmarks.eyes --checkpoint checkpoints/tiny-libero-spatial --task-id 0 --assets lowpoly

* Moved objects: how many episodes does it solve greedily in which all objects were moved by MOVED_M?
* Swapped inputs: how much do the decisions of these episodes change (KL divergence in nats a token, at temperature 1)
  when one input is replaced: by that of another episode at the same decision, by that of another task, or by black?
* Black images: how many of the benchmark's initial states does it solve without seeing anything?
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from command_line import main_guard, parse_flags
from contracts import Observation
from envs.env import ChunkResult, EnvSpec, Start
from envs.libero import LiberoEnv
from envs.pool import task_info
from envs.tasks import task_names
from experiment.statistics import count_successes
from vla.load_options import LoadOptions
from vla.policy import Policy
from workshop.moved_objects import reset_with_moved_objects

MOVED_M = 0.08
KL_BATCH = 16  # observations that are sent through the network together


@dataclass(frozen=True)
class Args:
    # Folder or hub id of the policy.
    checkpoint: str
    # Suite of the task.
    task_suite: str = "libero_spatial"
    # Task id within the suite.
    task_id: int = 0
    # Episodes with moved objects, whose decisions are compared.
    episodes: int = 20
    # Episodes with black images, from the benchmark's initial states (0: none).
    black_episodes: int = 50
    # Looks: lowpoly, official or a folder.
    assets: str = "lowpoly"
    # Where the policy runs: auto, cpu or cuda.
    device: str = "auto"


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.eyes", description=__doc__)
    policy = Policy.load(args.checkpoint, LoadOptions(args.task_suite, device=args.device))
    spec = EnvSpec(args.task_suite, (args.task_id,), policy.num_images, args.assets)
    env = LiberoEnv(spec, args.task_id)
    print(f"{args.checkpoint}: {env.instruction!r}, {args.assets} looks", flush=True)
    episodes = []
    outcomes = []
    for seed in range(args.episodes):
        start = Start(seed % 50, seed)
        moved = reset_with_moved_objects(env, start, MOVED_M, np.random.default_rng(seed))
        observations, success = play(policy, env, moved)
        episodes.append(observations)
        outcomes.append(success)
    print(f"moved objects: {count_successes(outcomes)} successes", flush=True)
    other_tasks = [task_id for task_id in range(len(task_names(args.task_suite))) if task_id != args.task_id]
    infos = task_info(EnvSpec(args.task_suite, tuple(other_tasks), num_images=1))
    for name, nats in swapped_inputs(policy, episodes, [info.instruction for info in infos]).items():
        print(f"{name:40} {nats:8.3f} nats a token", flush=True)
    if args.black_episodes > 0:
        starts = (env.reset(Start(state)) for state in range(args.black_episodes))
        outcomes = [play(policy, env, start, black=True)[1] for start in starts]
        print(f"black images: {count_successes(outcomes)} successes")
    env.close()


def play(
    policy: Policy, env: LiberoEnv, result: ChunkResult, black: bool = False
) -> tuple[list[Observation], bool]:
    """Play a greedy episode on from its first result.

    Returns what the policy saw at each decision, and whether it succeeded.
    """
    observations = []
    while result.observation is not None:
        observation = without_images(result.observation) if black else result.observation
        observations.append(observation)
        result = env.step_chunk(policy.act([observation]).actions[0])
    return observations, result.success


def swapped_inputs(
    policy: Policy, episodes: Sequence[Sequence[Observation]], instructions: Sequence[str]
) -> dict[str, float]:
    """How much decisions change when an input is replaced: name of the change -> mean KL divergence (nats a token)."""
    random = np.random.default_rng(0)
    pairs = [  # each observation with that at the same decision of the next episode, or its last one
        (observation, following[min(decision, len(following) - 1)])
        for episode, following in zip(episodes, [*episodes[1:], episodes[0]], strict=True)
        for decision, observation in enumerate(episode)
    ]
    seen = [observation for observation, _ in pairs]
    texts = random.choice(instructions, size=len(seen)).tolist()
    told = [replace(each, instruction=text) for each, text in zip(seen, texts, strict=True)]
    changed = {
        "image of another episode, same decision": [replace(a, images=b.images) for a, b in pairs],
        "black image": [without_images(each) for each in seen],
        "instruction of another task": told,
    }
    if policy.info.uses_proprio:
        changed["robot state of another episode"] = [replace(a, proprio=b.proprio) for a, b in pairs]
    before = log_probabilities(policy, seen)
    changes = {}
    for name, observations in changed.items():
        after = log_probabilities(policy, observations)
        # KL(before || after), its mean over decisions and tokens
        changes[name] = (before.exp() * (before - after)).sum(-1).mean().item()
    return changes


@torch.no_grad()
def log_probabilities(policy: Policy, observations: Sequence[Observation]) -> Tensor:
    """Log-probabilities of the action tokens at temperature 1, (N, A, 256) on the CPU."""
    starts = range(0, len(observations), KL_BATCH)
    batches = [observations[start : start + KL_BATCH] for start in starts]
    return torch.cat([policy.chunk_logits(batch).log_softmax(-1).cpu() for batch in batches])


def without_images(observation: Observation) -> Observation:
    return replace(observation, images=np.zeros_like(observation.images))


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.eyes", main))
