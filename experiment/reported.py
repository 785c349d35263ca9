"""The success rates that others report for public checkpoints, and how a measured start compares with them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiment.statistics import Successes
from rl.phases import TeacherMode


@dataclass(frozen=True)
class Report:
    """A success rate that others report, of one task or (None) as the mean over all tasks of a suite."""

    rate: float
    source: str
    task_id: int | None = None
    mode: TeacherMode = "greedy"  # how the checkpoint decided: by its most likely tokens, or by its L1 head


def _one_trajectory(simplevla_rl: float, rlinf: float) -> tuple[Report, ...]:
    """Reports on a checkpoint that was trained on one trajectory of each task."""
    return Report(simplevla_rl, "SimpleVLA-RL"), Report(rlinf, "RLinf")


def _by_l1_head(rate: float) -> Report:
    """The report on a checkpoint with an L1 head: Kim, Finn, Liang 2025 (arXiv 2502.19645)."""
    return Report(rate, "OpenVLA-OFT", mode="l1")


# (hub id, suite) -> what is reported. The two projects evaluate the same checkpoints by their own protocols.
REPORTS: dict[tuple[str, str], tuple[Report, ...]] = {
    ("Haozhan72/Openvla-oft-SFT-libero-spatial-traj1", "libero_spatial"): (
        *_one_trajectory(0.636, 0.565),
        Report(0.88, "one user", task_id=0),
    ),
    ("Haozhan72/Openvla-oft-SFT-libero-object-traj1", "libero_object"): _one_trajectory(0.549, 0.256),
    ("Haozhan72/Openvla-oft-SFT-libero-goal-traj1", "libero_goal"): _one_trajectory(0.596, 0.456),
    ("Haozhan72/Openvla-oft-SFT-libero10-traj1", "libero_10"): _one_trajectory(0.173, 0.097),
    ("moojink/openvla-7b-oft-finetuned-libero-spatial", "libero_spatial"): (_by_l1_head(0.976),),
    ("moojink/openvla-7b-oft-finetuned-libero-object", "libero_object"): (_by_l1_head(0.984),),
    ("moojink/openvla-7b-oft-finetuned-libero-goal", "libero_goal"): (_by_l1_head(0.979),),
    ("moojink/openvla-7b-oft-finetuned-libero-10", "libero_10"): (_by_l1_head(0.945),),
}


@dataclass(frozen=True)
class Comparison:
    """Whether a measured success rate is significantly below all reported ones, and a sentence that says so or not."""

    is_below: bool
    sentence: str


def compare_with_reports(
    checkpoint: str, suite: str, task_ids: Sequence[int], mode: str, measured: Successes, assets: str
) -> Comparison | None:
    """Compare the successes of an untrained checkpoint with what others report for it.

    That is the success on the one task of `task_ids`, or else the mean over the suite. The measured rate is below if
    its 95 % interval ends below the lowest reported one. mode: how the checkpoint decided. assets: those that it was
    measured with. Returns None if nobody reports on it, or if it decided in another mode than the reported one.
    """
    hub_id = hub_id_of(checkpoint)
    if hub_id is None or (hub_id, suite) not in REPORTS:
        return None
    on_suite = [report for report in REPORTS[hub_id, suite] if report.task_id is None]
    on_task = [report for report in REPORTS[hub_id, suite] if (report.task_id,) == tuple(task_ids)]
    reports = on_task or on_suite
    if any(report.mode != mode for report in reports):
        return None
    reported = f"what others report for {hub_id}: "
    if on_task:
        reported += f"{_rates(on_task)} on task {task_ids[0]}; "
    reported += f"{_rates(on_suite)} as the mean over all tasks of {suite}, which differ"
    _, highest = measured.interval
    if highest >= min(report.rate for report in reports):
        return Comparison(False, f"{measured} is not below {reported}")
    return Comparison(
        True,
        f"{measured} is significantly below {reported}. Look first at --assets (these were {assets}, the training had "
        "official), at first_frame.png and the videos (upright, not cropped twice), and at the rows "
        "versions and suite of train_grpo.py --check-only: docs/TROUBLESHOOTING.md",
    )


def hub_id_of(checkpoint: str) -> str | None:
    """The hub id of a checkpoint that others report on, or None; also for an adapter, which was trained further.

    A local folder counts as the checkpoint if it lies in the download cache, or has the checkpoint's name.
    """
    from vla.adapter_folder import base_and_adapter  # takes seconds

    base, adapter = base_and_adapter(checkpoint)
    if adapter is not None:
        return None
    hub_ids = {hub_id for hub_id, _ in REPORTS}
    in_cache = re.search(r"models--([^/]+?)--([^/]+)/snapshots/", base)
    if in_cache is not None:
        base = f"{in_cache[1]}/{in_cache[2]}"
    elif Path(base).expanduser().is_dir():
        by_name = {hub_id.split("/")[1]: hub_id for hub_id in hub_ids}
        return by_name.get(Path(base).expanduser().resolve().name)
    return base if base in hub_ids else None


def _rates(reports: Sequence[Report]) -> str:
    return " and ".join(f"{100 * report.rate:.3g} % ({report.source})" for report in reports)
