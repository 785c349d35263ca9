"""The real command lines on a small checkpoint, the real simulator and the low-poly pack."""

from pathlib import Path

import pytest

from contracts import resolve_pointer
from experiment.stored_run import METRICS_FILE, MetricsRow, read_metrics
from workshop.tiny import make_tiny_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> str:
    """A small random checkpoint in the real folder format."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    return str(make_tiny_checkpoint(folder))


@pytest.fixture(scope="module")
def smoke(checkpoint, tmp_path_factory) -> list[str]:
    """Flags of a run of seconds whose updates move the parameters although no episode succeeds (KL, entropy)."""
    return [
        "--preset", "smoke", "--device", "cpu", "--checkpoint", checkpoint,
        "--output", str(tmp_path_factory.mktemp("runs")), "--kl-coef", "0.1", "--entropy-coef", "0.01",
    ]  # fmt: skip


def flags_into(flags: list[str], folder: Path) -> list[str]:
    """The same flags with another --output."""
    flags = list(flags)
    flags[flags.index("--output") + 1] = str(folder)
    return flags


def only_run(flags: list[str]) -> Path:
    """The run folder below the --output of `flags`; there must be exactly one."""
    (folder,) = Path(flags[flags.index("--output") + 1]).iterdir()
    return folder


def records_of(run: Path) -> list[MetricsRow]:
    return read_metrics(run / METRICS_FILE)


def latest_of(run: Path) -> Path:
    """The checkpoint that the pointer `latest` names."""
    return resolve_pointer(run / "checkpoints" / "latest")
