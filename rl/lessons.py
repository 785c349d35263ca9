"""Lessons: all rollouts so far of a warmup in which the student acts, with the tokens that the teacher would choose.

From the last rollout alone the student would forget what to do in the states of earlier ones, and could return to
them. The guarantee of on-policy imitation is about all rollouts together (DAgger, Ross et al. 2011). They stay in main
memory, some 300 kB a decision with two images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contracts import Observation
from rl.trajectory import Batch, token_weights


def remember(lessons: list[Batch], batch: Batch) -> Batch:
    """Add a labelled rollout to the lessons. Returns a batch of all of them.

    The hidden states that a frozen trunk computed are too large to be kept for all. So only the update after the first
    rollout uses them, and later ones compute them again for all rows: passes that computed them for some rows alone
    would have too many sizes, each of which a GPU has to compile and record.
    """
    lessons.append(replace(batch, kept=[None] * len(batch)))
    return join(lessons) if len(lessons) > 1 else batch


def join(batches: Sequence[Batch]) -> Batch:
    """One batch with the rows of all, without hidden states. Numbers of trajectories repeat; imitation reads none."""
    columns: dict[str, Tensor] = {}
    for name in batches[0].columns():
        columns[name] = torch.cat([batch.columns()[name] for batch in batches])
    observations = list(chain.from_iterable(batch.observations for batch in batches))
    no_states: list[Tensor | None] = [None] * len(observations)
    return replace(batches[0], observations=observations, kept=no_states, **columns)


def draw(batch: Batch, num_rows: int, generator: torch.Generator) -> Batch:
    """The rows of an epoch: as many as the newest rollout has, from all lessons alike.

    So an update takes as many steps as without the earlier rollouts. A batch of that size is returned as it is.
    """
    if num_rows == len(batch):
        return batch
    drawn = batch[torch.randperm(len(batch), generator=generator)[:num_rows]]
    return replace(drawn, weights=token_weights(drawn.executed))


def to_tensors(batch: Batch) -> dict[str, Any]:
    """A lesson as tensors and plain values, for a file."""
    images = np.stack([observation.images for observation in batch.observations])
    proprio = np.stack([observation.proprio for observation in batch.observations])
    return {
        "images": torch.from_numpy(images),
        "proprio": torch.from_numpy(proprio),
        "instructions": [observation.instruction for observation in batch.observations],
        "prepared": batch.observations[0].prepared,
        "columns": batch.columns(),
    }


def from_tensors(stored: Mapping[str, Any]) -> Batch:
    """The opposite of `to_tensors`, without the simulator's state, which no policy reads."""
    seen = zip(stored["images"].numpy(), stored["proprio"].numpy(), stored["instructions"], strict=True)
    observations = [Observation(*one, prepared=stored["prepared"]) for one in seen]
    return Batch(observations=observations, kept=[None] * len(observations), **stored["columns"])
