"""How evenly the labels of demonstrations are spread: the share of each motion's labels that fall into one bin.

A share far above the others is a spike. Where a policy is unsure, the spike becomes its most likely action, whatever
the right one is (workshop/noisy_episode.py says what follows). Of 256 equal shares each would be 0.4 %.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from workshop.demo_files import CHUNK_LENGTH, list_episodes, read_episode

NUM_BINS = 256  # as the action tokens have
MOTIONS = ("x", "y", "z", "roll", "pitch", "yaw")


def labels_of(folder: Path) -> np.ndarray:
    """The labels (T, 7) that a policy learns from the episodes of a folder: the actions of every frame's chunk."""
    labels = []
    for path in list_episodes(folder):
        episode = read_episode(path)
        steps = episode.frame_steps[:, None] + np.arange(CHUNK_LENGTH)
        labels.append(episode.actions[steps].reshape(-1, episode.actions.shape[1]))
    return np.concatenate(labels)


def fullest_bins(labels: np.ndarray) -> np.ndarray:
    """The share of the labels (T, 7) in the fullest bin, for each of the six motions, (6,).

    The bins divide the range from the 1st to the 99th percentile, as the action tokens do; values beyond it fall into
    the outermost bins.
    """
    motions = labels[:, : len(MOTIONS)].astype(np.float64)
    low, high = np.quantile(motions, [0.01, 0.99], axis=0)
    shares = []
    for values, lowest, highest in zip(motions.T, low, high, strict=True):
        counts, _ = np.histogram(np.clip(values, lowest, highest), NUM_BINS, (lowest, highest))
        shares.append(counts.max() / len(values))
    return np.array(shares)


def describe(shares: Sequence[float] | np.ndarray) -> str:
    """One line about the shares of `fullest_bins`."""
    parts = [f"{name} {share:.1%}" for name, share in zip(MOTIONS, shares, strict=True)]
    return f"labels in the fullest of {NUM_BINS} bins: {', '.join(parts)}"
