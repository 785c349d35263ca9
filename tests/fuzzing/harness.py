"""Reading damaged folders in processes that may hang, crash or run out of memory: what became of each.

A worker is a fork that has everything imported. Its address space is limited, a watchdog ends it where one input takes
too long, and an audit hook notices what no reader may do: start a program, use the network, change files elsewhere.
"""

import faulthandler
import gc
import json
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

from hypothesis import HealthCheck, Phase, given, seed, settings

from errors import BadInput
from tests.fuzzing.damage import Entry, damaged, read_folder, write_folder
from tests.fuzzing.formats import MARKER

MEMORY_BYTES = 1 << 30  # that an input may take, of address space; half of it of real memory
LONGEST_MESSAGE = 2_000
INPUTS_PER_WORKER = 400
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "socket.getaddrinfo",
)
CHANGING = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.truncate", "os.symlink", "os.link")


@dataclass(frozen=True)
class Reader:
    """Something that reads files of users. `prepare` writes a valid folder and returns what reads such folders."""

    name: str
    prepare: Callable[[Path], Callable[[Path], object]]
    share: int = 100  # of the inputs, relative to the other readers': slow ones get fewer
    intact: tuple[str, ...] = ()  # files that are not damaged, because reading them is another reader's
    hostile: Callable[[Path], Mapping[str, tuple[bytes, ...]]] | None = None  # ready-made contents by suffix


@dataclass(frozen=True)
class Failure:
    reader: str
    kind: str  # traceback, message, hang, crash, memory, code
    detail: str
    folder: Path  # the input, kept


@dataclass
class Tally:
    """What became of the inputs of one reader."""

    accepted: int = 0
    refused: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    @property
    def inputs(self) -> int:
        return self.accepted + self.refused + len(self.failures)


@dataclass(frozen=True)
class Prepared:
    """A reader with its valid folder."""

    reader: Reader
    read: Callable[[Path], object]
    folder: Path
    files: dict[str, Entry]  # that get damaged
    hostile: Mapping[str, tuple[bytes, ...]]


def prepare(reader: Reader, folder: Path) -> Prepared:
    """Write the valid folder and make sure that it is read."""
    read = reader.prepare(folder)
    read(folder)
    hostile = reader.hostile(folder) if reader.hostile else {}
    files = {name: entry for name, entry in read_folder(folder).items() if name not in reader.intact}
    return Prepared(reader, read, folder, files, hostile)


def fuzz(
    readers: Sequence[Prepared],
    inputs: Mapping[str, int],
    work: Path,
    first_seed: int,
    workers: int,
    limit_s: float,
    stop_after_s: float = math.inf,
) -> dict[str, Tally]:
    """Let every reader read so many damaged folders; failing inputs are kept in `work`.

    Readers take turns. Equal arguments give equal inputs: seeds are counted per reader, and what a worker that dies
    has left is made up for by the next seed. After `stop_after_s` seconds no further worker starts.
    """
    end = perf_counter() + stop_after_s
    tallies = {prepared.reader.name: Tally() for prepared in readers}
    waiting = [prepared for prepared in readers if inputs[prepared.reader.name]]
    running: dict[int, tuple[multiprocessing.Process, Prepared, Path]] = {}
    started: Counter[str] = Counter()
    while waiting or running:
        while waiting and len(running) < workers:
            prepared = waiting.pop(0)
            name = prepared.reader.name
            count = min(INPUTS_PER_WORKER, inputs[name] - tallies[name].inputs)
            number = first_seed + started[name]
            place = work / f"worker_{readers.index(prepared)}_{number}"
            place.mkdir()
            job = (prepared, count, number, place, limit_s)
            process = multiprocessing.get_context("fork").Process(target=_work, args=job)
            process.start()
            running[process.sentinel] = process, prepared, place
            started[name] += 1
        for sentinel in wait(list(running)):
            process, prepared, place = running.pop(sentinel)
            process.join()
            name = prepared.reader.name
            _collect(tallies[name], prepared, place, process.exitcode, work)
            shutil.rmtree(place)
            if tallies[name].inputs < inputs[name]:
                waiting.append(prepared)
        if perf_counter() > end:
            waiting.clear()
    return tallies


def _collect(tally: Tally, prepared: Prepared, place: Path, exit_code: int, work: Path) -> None:
    """Count what a worker has written down; an input that it did not survive is still in its place."""
    for line in (place / "record.jsonl").read_text().splitlines():
        outcome = json.loads(line)
        tally.accepted += outcome["what"] == "accepted"
        tally.refused += outcome["what"] == "refused"
        tally.seconds += outcome["seconds"]
        if outcome["what"] not in ("accepted", "refused"):
            tally.failures.append(
                Failure(prepared.reader.name, outcome["what"], outcome["detail"], Path(outcome["kept"]))
            )
    if exit_code == 0:
        return
    report = (place / "stack.txt").read_text(errors="replace")
    report = report[:5_000] + report[5_000:][-5_000:]
    if not (place / "input").exists():
        raise RuntimeError(f"a worker failed between two inputs: {report}")
    kind = "hang" if "Timeout (" in report else f"crash ({_ending(exit_code)})"
    kept = _keep(place / "input", work, prepared.reader.name, kind, report)
    tally.failures.append(Failure(prepared.reader.name, kind, report, kept))


def _ending(exit_code: int) -> str:
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"


def _keep(folder: Path, work: Path, reader: str, kind: str, detail: str) -> Path:
    """Move a failing input where it stays, with a report beside it."""
    (work / "failures").mkdir(exist_ok=True)
    kept = Path(tempfile.mkdtemp(prefix=re.sub(r"\W+", "_", reader) + "-", dir=work / "failures"))
    folder.rename(kept / "input")
    (kept / "report.json").write_text(json.dumps({"reader": reader, "kind": kind, "detail": detail}, indent=1))
    return kept


def _work(prepared: Prepared, count: int, number: int, place: Path, limit_s: float) -> None:
    """The body of a worker: read `count` damaged folders and write down what became of each."""
    gc.freeze()  # what was there before the fork is shared as long as nobody touches it
    os.chdir(place)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY_BYTES,) * 2)
    forbidden: list[str] = []
    sys.addaudithook(lambda event, arguments: _watch(forbidden, place, event, arguments))
    with open("stack.txt", "w") as stack, open("record.jsonl", "w") as record:
        for stream in (1, 2):  # what libraries print
            os.dup2(stack.fileno(), stream)
        faulthandler.enable(stack)

        @seed(number)
        @settings(
            max_examples=count, database=None, deadline=None, derandomize=False, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(damaged(prepared.files, prepared.hostile))
        def read_one(entries: dict[str, Entry]) -> None:
            outcome = _outcome_of_input(prepared, entries, place / "input", forbidden, stack, limit_s)
            record.write(json.dumps(outcome) + "\n")
            record.flush()

        read_one()


def _outcome_of_input(
    prepared: Prepared, entries: Mapping[str, Entry], folder: Path, forbidden: list[str], stack: TextIO, limit_s: float
) -> dict[str, Any]:
    """Write the folder, read it, look at what has happened, and delete or keep it."""
    valid = {name: prepared.folder / name for name, entry in prepared.files.items() if isinstance(entry, bytes)}
    unchanged = {name: path for name, path in valid.items() if entries.get(name) is prepared.files[name]}
    unchanged |= {name: prepared.folder / name for name in prepared.reader.intact}
    write_folder(folder, {**entries, **dict.fromkeys(prepared.reader.intact, b"")}, unchanged)
    forbidden.clear()
    memory, started = _peak_memory(), perf_counter()
    faulthandler.dump_traceback_later(limit_s, exit=True, file=stack)
    what, detail = outcome_of(prepared.read, folder)
    faulthandler.cancel_dump_traceback_later()
    seconds, grown = perf_counter() - started, _peak_memory() - memory
    if forbidden or Path(MARKER).exists():
        what, detail = "code", "; ".join(forbidden) or f"{MARKER} is there"
        shutil.rmtree(MARKER, ignore_errors=True)
    elif grown > MEMORY_BYTES // 2:
        what, detail = "memory", f"{grown >> 20} MiB; {what}: {detail}"
    outcome = {"what": what, "detail": detail, "seconds": seconds}
    if what in ("accepted", "refused"):
        shutil.rmtree(folder)
    else:
        outcome["kept"] = str(_keep(folder, folder.parent.parent, prepared.reader.name, what, detail))
    return outcome


def outcome_of(read: Callable[[Path], object], folder: Path) -> tuple[str, str]:
    """(accepted, ""), (refused, message), or what went wrong and its details."""
    try:
        read(folder)
    except BadInput as refusal:
        message = str(refusal)
        if not message.isprintable() or len(message) > LONGEST_MESSAGE or str(folder) not in message:
            return "message", repr(message)
        return "refused", message
    except BaseException:
        return "traceback", traceback.format_exc()
    return "accepted", ""


def _watch(forbidden: list[str], place: Path, event: str, arguments: tuple[object, ...]) -> None:
    """Audit hook: note what no reader may do. Python code and files of this process alone are not looked at."""
    if event in FORBIDDEN:
        forbidden.append(f"{event} {arguments!r:.200}")
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if (writes or event in CHANGING) and isinstance(arguments[0], str | bytes | os.PathLike):
        path = os.path.abspath(os.fsdecode(arguments[0]))
        if not path.startswith((str(place), "/dev/null", str(place.parent / "failures"))):
            forbidden.append(f"{event} {path}")


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
