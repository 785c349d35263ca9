"""Let every reader of users' files read damaged and hostile ones; print what became of them.

    nice -n 19 python -m benchmarks.fuzz --inputs 100000 --out /tmp/fuzz
    python -m benchmarks.fuzz --replay /tmp/fuzz/failures/BDDL_file-0

Each input ends in one of three ways. Accepted: the file was used. Refused: BadInput, one line that names the file. All
else is a failure: another exception, no end, a crash, memory, code that ran, a file changed elsewhere, a network call.
Failing inputs are kept, and --replay reads one again. Equal arguments give equal inputs.
"""

import json
import math
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from tests.fuzzing.harness import Tally, fuzz, outcome_of, prepare
from tests.fuzzing.readers import READERS


@dataclass(frozen=True)
class Arguments:
    inputs: int = 100_000
    """Inputs over all readers; slow readers get fewer of them."""
    seed: int = 0
    """Of the first worker; another one gives other inputs."""
    workers: int = 2
    """Processes."""
    minutes: float = math.inf
    """After which no further inputs are begun."""
    limit_s: float = 10.0
    """Seconds of wall time after which an input counts as a hang."""
    out: Path = Path("fuzz")
    """Folder for the failing inputs; must not exist."""
    replay: Path | None = None
    """Folder of a failing input to read again, in this process."""


def shares(inputs: int) -> dict[str, int]:
    """Inputs of each reader: together at least `inputs`."""
    total = sum(reader.share for reader in READERS)
    return {reader.name: math.ceil(inputs * reader.share / total) for reader in READERS}


def table(tallies: Mapping[str, Tally]) -> str:
    """Markdown."""
    rows = ["| reader | inputs | accepted | refused | failures | seconds |", "|---|---|---|---|---|---|"]
    for name, tally in tallies.items():
        counts = tally.inputs, tally.accepted, tally.refused, len(tally.failures)
        rows.append(f"| {name} | {' | '.join(f'{count:,}' for count in counts)} | {tally.seconds:.0f} |")
    every = list(tallies.values())
    counts = (sum(getattr(tally, name) for tally in every) for name in ("inputs", "accepted", "refused"))
    failures = sum(len(tally.failures) for tally in every)
    seconds = sum(tally.seconds for tally in every)
    rows.append(f"| all | {' | '.join(f'{count:,}' for count in counts)} | {failures} | {seconds:.0f} |")
    return "\n".join(rows)


def replay(kept: Path) -> None:
    report = json.loads((kept / "report.json").read_text())
    (reader,) = (reader for reader in READERS if reader.name == report["reader"])
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(reader, Path(folder).resolve() / "valid")
        print(*outcome_of(prepared.read, (kept / "input").resolve()))


def main() -> int:
    args = tyro.cli(Arguments, description=__doc__)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.replay is not None:
        replay(args.replay)
        return 0
    work = args.out.resolve()
    (work / "valid").mkdir(parents=True)
    started = time.perf_counter()
    readers = [prepare(reader, work / "valid" / str(number)) for number, reader in enumerate(READERS)]
    tallies = fuzz(readers, shares(args.inputs), work, args.seed, args.workers, args.limit_s, 60 * args.minutes)
    shutil.rmtree(work / "valid")
    print(table(tallies))
    failures = [failure for tally in tallies.values() for failure in tally.failures]
    for failure in failures:
        print(f"\n{failure.reader}: {failure.kind}: {failure.folder}\n{failure.detail.strip()[-1000:]}")
    print(f"\n{time.perf_counter() - started:.0f} s in all")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
