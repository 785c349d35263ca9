"""Give out the episodes of an evaluation so that simulators keep their tasks: building another takes seconds."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable

from rl.trajectory import Episode


class EpisodesByTask:
    """Episodes that are all to be played, in any order."""

    def __init__(self, episodes: Iterable[Episode]) -> None:
        self._left: dict[int, deque[Episode]] = defaultdict(deque)  # by task
        for episode in episodes:
            self._left[episode.task_id].append(episode)
        self._task_of_slot: dict[int, int] = {}

    def next_for(self, slot: int) -> Episode | None:
        """The slot's next episode: of its task, or, if that has none left, of the task with most left for each slot."""
        task_id = self._task_of_slot.pop(slot, None)
        if task_id is None or not self._left[task_id]:
            num_slots = Counter(self._task_of_slot.values())
            shares = {task: len(left) / (1 + num_slots[task]) for task, left in self._left.items() if left}
            if not shares:
                return None
            task_id = max(shares, key=lambda task: shares[task])
        self._task_of_slot[slot] = task_id
        return self._left[task_id].popleft()
