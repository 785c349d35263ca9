"""What demonstrations are made of. Imports nothing heavy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Everything that the content of a folder of demonstrations depends on, besides tasks and number."""

    task_suite: str = "libero_spatial"
    """LIBERO suite that the tasks belong to."""
    init_states: tuple[int, int] = (0, 40)
    """First and one-past-last of the benchmark's initial states; by default the last ten of a task are held out."""
    noise_scales: tuple[float, ...] = (0.3, 0.6, 0.9, 1.2)
    """Standard deviations, as shares of full action, of the bursts of noise on the executed moves; the episodes take
    them in turn."""
    frame_every: int = 4
    """Env steps between two frames, where the chunk of a frame is free of noise."""
    seed: int = 0
    """Seed of everything random."""
    assets: str = "lowpoly"
    """What objects look like: `lowpoly`, `official` or a folder."""
