"""How evenly the labels of demonstrations are spread: the share of each motion's labels that fall into one bin.

A share far above the others is a spike. Where a policy is unsure, the spike becomes its most likely action, whatever
the right one is (workshop/noisy_episode.py says what follows). Of 256 equal shares each would be 0.4 %.
"""

from pathlib import Path

import numpy as np

from workshop.demo_files import list_episodes, read_episode

NUM_BINS = 256  # as the action tokens have
MOTIONS = ("x", "y", "z", "roll", "pitch", "yaw")


def fullest_bins(labels: np.ndarray) -> np.ndarray:
    """The share of the labels (T, 7) in the fullest bin, for each of the six motions, (6,).

    The bins divide the range from the 1st to the 99th percentile, as the action tokens do; values beyond it fall into
    the outermost bins.
    """
    motions = labels[:, : len(MOTIONS)].astype(np.float64)
    low, high = np.quantile(motions, [0.01, 0.99], axis=0)
    places = (motions.clip(low, high) - low) / (high - low)  # in [0, 1]
    counts = [np.histogram(values, NUM_BINS, (0.0, 1.0))[0].max() for values in places.T]
    return np.array(counts) / len(motions)


def describe_labels(folder: Path) -> str:
    """One line about the labels that a policy learns from the episodes of a folder."""
    labels = np.concatenate([read_episode(path).chunks() for path in list_episodes(folder)])
    shares = fullest_bins(labels.reshape(-1, labels.shape[-1]))
    parts = [f"{name} {share:.1%}" for name, share in zip(MOTIONS, shares, strict=True)]
    return f"labels in the fullest of {NUM_BINS} bins: {', '.join(parts)}"
