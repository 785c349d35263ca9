"""What a fine-tuning run leaves behind beside the weights: records, curves and how it was made."""

import json
import subprocess
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from untrusted.json_file import as_object, parse_json
from untrusted.plain_file import read_text
from vla.sft_loss import ACTION_NAMES, Diagnosis

METRICS_FILE = "sft_metrics.jsonl"
CURVES_FILE = "sft_curves.png"


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Append one line to sft_metrics.jsonl."""
    with (folder / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_records(folder: Path) -> list[dict[str, Any]]:
    """None for a run that ended before its first record. Raises BadInput for what is no record."""
    path = folder / METRICS_FILE
    lines = read_text(path).splitlines() if path.exists() else []
    return [as_object(parse_json(line, f"{path}: line {i}"), f"{path}: line {i}") for i, line in enumerate(lines, 1)]


def held_out_metrics(diagnosis: Diagnosis | None) -> dict[str, float]:
    """A diagnosis as entries of a record; none without held-out frames."""
    if diagnosis is None:
        return {}
    return {
        "held_out/nll": diagnosis.nll,
        "held_out/accuracy": diagnosis.mean_accuracy(),
        "held_out/xyz_bin_error": diagnosis.position_error(),
        **{f"held_out/entropy_{name}": e for name, e in zip(ACTION_NAMES, diagnosis.entropy, strict=True)},
    }


def step_line(record: dict[str, Any], steps: int) -> str:
    """One readable line per record."""
    parts = [
        f"step {record['step']}/{steps}  loss {record['loss']:.3f}, accuracy {100 * record['accuracy']:.1f} %, "
        f"xyz off by {record['xyz_bin_error']:.1f} bins"
    ]
    if record["objects_loss"]:
        parts.append(f"objects {record['objects_loss']:.3f}")
    if "held_out/nll" in record:
        parts.append(
            f"held out: {record['held_out/nll']:.3f}, {100 * record['held_out/accuracy']:.1f} %, "
            f"{record['held_out/xyz_bin_error']:.1f} bins"
        )
    parts.append(f"{record['samples_per_s']:,.0f} samples/s, {record['seconds'] / 60:.1f} min")
    return "  |  ".join(parts)


def plot_curves(folder: Path) -> Path:
    """Loss, accuracy, error and entropy against optimizer steps: sft_curves.png."""
    records = read_records(folder)
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    _lines(axes[0, 0], records, {"loss": "training loss", "held_out/nll": "held out, nats per token"}, "loss")
    _lines(axes[0, 1], records, {"accuracy": "training", "held_out/accuracy": "held out"}, "share of tokens met")
    _lines(axes[1, 0], records, {"xyz_bin_error": "training", "held_out/xyz_bin_error": "held out"}, "bins off, x y z")
    _lines(axes[1, 1], records, {f"held_out/entropy_{name}": name for name in ACTION_NAMES}, "entropy held out, nats")
    figure.suptitle(folder.name)
    path = folder / CURVES_FILE
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _lines(axis: plt.Axes, records: list[dict[str, Any]], keys: dict[str, str], title: str) -> None:
    for key, label in keys.items():
        points = [(record["step"], record[key]) for record in records if key in record]
        axis.plot(*zip(*points, strict=True) if points else ([], []), ".-", label=label)
    axis.set_title(title)
    axis.set_xlabel("optimizer steps")
    axis.legend(fontsize=8)


def git_commit() -> str | None:
    """The commit of this program, marked if its files differ from it; None outside a git checkout."""
    here = Path(__file__).parent
    try:
        commit, changes = (
            subprocess.run(["git", *command], cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() + (" with changes" if changes.strip() else "")
