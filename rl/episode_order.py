"""Which episodes of a rollout start next, in which simulator, and which are kept: all of them, or about n_steps."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable

from rl.ranks import Ranks
from rl.trajectory import Episode


class PlayAll:
    """Plays all episodes, in any order. Simulators keep their tasks, because building another task takes seconds.

    Every rank plays every `size`-th episode.
    """

    def __init__(self, episodes: Iterable[Episode], ranks: Ranks) -> None:
        self._left: dict[int, deque[Episode]] = defaultdict(deque)  # by task
        for place, episode in enumerate(episodes):
            if place % ranks.size == ranks.rank:
                self._left[episode.task_id].append(episode)
        self._task_of_slot: dict[int, int] = {}

    def next_for(self, slot: int) -> Episode | None:
        """The slot's next episode, of the task that it played last.

        If that task has none left, it is the task with the most episodes left for each slot that plays it.
        """
        task_id = self._task_of_slot.pop(slot, None)
        if task_id is None or not self._left[task_id]:
            num_slots = Counter(self._task_of_slot.values())
            shares = {task: len(left) / (1 + num_slots[task]) for task, left in self._left.items() if left}
            if not shares:
                return None
            task_id = max(shares, key=lambda task: shares[task])
        self._task_of_slot[slot] = task_id
        return self._left[task_id].popleft()

    def count(self, episode: Episode, env_steps: int) -> None:
        """Lengths do not matter here."""

    def keeps(self, episode: Episode) -> bool:
        """All episodes are kept."""
        return True


class PlaySteps:
    """Plays episodes in their order until they hold about `n_steps` env steps over all ranks.

    The speed of the simulators does not change which episodes are kept. With W simulators, W - 1 other episodes may be
    running when a group starts. So a group may start if all episodes before it, without the last W - 1 of them, hold
    fewer than `n_steps` env steps. Some of these may be running, too, if one is slow. So the rule is applied again at
    the end, with the final lengths, to decide what is kept.

    Example: W = 2, n_steps = 100, groups of one episode, which last 60, 50, 40, ... env steps. Episodes 0 and 1 start
    at once. Episode 2 may start if episode 0 holds fewer than 100 env steps, so it starts when a simulator is free.
    Episode 3 may start if episodes 0 and 1 together do. Once both have ended they hold 110, so the rollout is episodes
    0 to 2, 150 env steps. Had episode 0 been slow, and only 40 env steps far when the other simulator was free, episode
    3 would have started, and would be left out at the end: it counts nowhere, not in global_step either.

    Every rank plays every `size`-th group, so that no member of a group is left out.
    """

    def __init__(self, episodes: Iterable[Episode], n_steps: int, num_envs: int, ranks: Ranks) -> None:
        self._episodes = (episode for episode in episodes if episode.group % ranks.size == ranks.rank)
        self._n_steps = math.ceil(n_steps / ranks.size)
        self._num_envs = num_envs
        self._lengths: dict[int, int] = {}  # env steps so far by episode, in order of start
        self._episodes_before_group: dict[int, int] = {}
        self._next: Episode | None = None

    def next_for(self, slot: int) -> Episode | None:
        """The next episode to play, in any slot, or None when none may start now."""
        if self._next is None:
            self._next = next(self._episodes, None)
        episode = self._next
        if episode is None:
            return None
        self._episodes_before_group.setdefault(episode.group, len(self._lengths))
        if not self.keeps(episode):
            return None
        self._next = None
        self._lengths[episode.index] = 0
        return episode

    def count(self, episode: Episode, env_steps: int) -> None:
        """Remember how many env steps an episode has played so far."""
        self._lengths[episode.index] = env_steps

    def keeps(self, episode: Episode) -> bool:
        """Whether an episode's group belongs to the rollout, by the lengths that are known now."""
        num_decisive = max(0, self._episodes_before_group[episode.group] - self._num_envs + 1)
        return sum(itertools.islice(self._lengths.values(), num_decisive)) < self._n_steps


EpisodeQueue = PlayAll | PlaySteps  # what gives out the episodes to play
