"""Draw the success of a policy by kind and magnitude of perturbation."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from envs.perturb import NONE, from_label
from experiment.results import Results
from experiment.statistics import count_successes


def draw_perturbations(results: Results, labels: Sequence[str], before: Results | None, path: Path) -> Path:
    """Draw a panel for each kind: success by magnitude, with 95 % intervals. Magnitude 0 means unperturbed.

    `before`: results of another policy, drawn in the same panels where it has played all magnitudes of a kind. Writes
    the picture to `path` and returns `path`.
    """
    kinds = list(dict.fromkeys(_kind(label) for label in labels))
    figure = Figure(figsize=(2.2 * len(kinds) + 1, 2.8), layout="constrained")
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for panel, kind in zip(panels, kinds, strict=True):
        kind_labels = [NONE, *(label for label in labels if _kind(label) == kind)]
        if before is not None:
            _draw_policy(panel, before, kind_labels, "before", "#999999")
        _draw_policy(panel, results, kind_labels, "this policy", "C0")
        magnitudes = [_magnitude(label) for label in kind_labels]
        panel.set(title=kind, xlabel="magnitude", ylim=(-0.03, 1.03), xticks=magnitudes)
    panels[0].set_ylabel("success rate")
    if before is not None:
        panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    return path


def _draw_policy(panel: Axes, results: Results, labels: Sequence[str], name: str, colour: str) -> None:
    """Draw the curve of one policy, or nothing if it has not played the episodes of one of the labels."""
    outcomes = [results.outcomes(perturbation=label) for label in labels]
    if not all(outcomes):
        return
    successes = [count_successes(played.values()) for played in outcomes]
    below = [s.rate - s.interval[0] for s in successes]
    above = [s.interval[1] - s.rate for s in successes]
    panel.errorbar(
        [_magnitude(label) for label in labels],
        [s.rate for s in successes],
        [below, above],
        marker="o",
        capsize=3,
        color=colour,
        label=name,
    )


def _kind(label: str) -> str:
    perturbation = from_label(label, seed=0)
    return NONE if perturbation is None else perturbation.kind


def _magnitude(label: str) -> int:
    perturbation = from_label(label, seed=0)
    return 0 if perturbation is None else perturbation.magnitude
