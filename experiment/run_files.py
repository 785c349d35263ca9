"""The files of a run folder, and how the programs that only look at a run read them."""

import json
from pathlib import Path
from typing import TypeAlias

from pydantic import ConfigDict, with_config

from contracts import BadInput, read_bytes, read_fields
from experiment.provenance import Provenance

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
LOG_FILE = "train.log"

MetricsRow: TypeAlias = dict[str, float]  # global_step, update and metrics


@with_config(ConfigDict(extra="allow"))  # a resumed run keeps the fields of other versions
class RunDescription(Provenance, total=False):
    """The contents of config.json: the provenance, and what decides the result of the run."""

    config: dict[str, dict[str, object]]  # settings by section: see configs.config.config_from_json
    looks: str  # name and digest of the assets
    hub_commit: str | None  # of the checkpoint, if it came from the hub
    ranks: int  # processes that train together; missing in runs of older versions
    resume_argv: list[list[str]]  # the command lines that resumed the run; missing if none did


def read_description(folder: Path) -> RunDescription:
    """Read the config.json of a run folder. Raises BadInput."""
    return read_fields(folder / CONFIG_FILE, RunDescription)


def read_metrics(path: Path) -> list[MetricsRow]:
    """Read the records of a metrics.jsonl. Raises BadInput if there is none, or if a record is damaged.

    Values that were not finite (null in the file) are left out, and so is a last line that a kill has cut.
    """
    *lines, _ = read_bytes(path).split(b"\n")  # a whole last line ends with a newline, too
    try:
        records = [json.loads(line) for line in lines]
        return [{key: value for key, value in record.items() if value is not None} for record in records]
    except (ValueError, AttributeError) as error:
        raise BadInput(f"{path} is damaged: {error}") from None
