"""Files of users end in use or in one line, never in a traceback, a hang, a crash or code that runs.

`python -m benchmarks.fuzz` does the same at length. The second half proves that the harness sees what it looks for.
"""

import ctypes
import json
import os
import socket
import time

import pytest

from benchmarks.fuzz import shares, table
from errors import BadInput
from tests.fuzzing.formats import CODE
from tests.fuzzing.harness import Reader, fuzz, prepare
from tests.fuzzing.readers import READERS

INPUTS = 200
# Kinds of tensors that torch advises against, for files that hold them.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant", "ignore:torch.quantize_per_tensor")


@pytest.fixture(scope="module")
def tallies(tmp_path_factory):
    work = tmp_path_factory.mktemp("fuzz")
    (work / "valid").mkdir()
    readers = [prepare(reader, work / "valid" / str(number)) for number, reader in enumerate(READERS)]
    return fuzz(readers, shares(INPUTS), work, first_seed=1, workers=2, limit_s=30.0)


@pytest.mark.parametrize("reader", [reader.name for reader in READERS])
def test_every_reader_uses_a_file_or_refuses_it_in_one_line(tallies, reader):
    tally = tallies[reader]
    assert not tally.failures, tally.failures[0]
    assert tally.inputs >= shares(INPUTS)[reader]


def test_the_table_has_every_reader_and_its_counts_add_up(tallies):
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(tallies).splitlines()[2:]]
    assert [row[0] for row in rows] == [*(reader.name for reader in READERS), "all"]
    numbers = [[int(cell.replace(",", "")) for cell in row[1:5]] for row in rows]
    assert [sum(column) for column in zip(*numbers[:-1], strict=True)] == numbers[-1]
    assert all(inputs == accepted + refused + failures for inputs, accepted, refused, failures in numbers)
    assert numbers[-1][1] > INPUTS / 20  # the damage is not all so coarse that the first check finds it
    assert numbers[-1][2] > INPUTS / 2


def hang() -> None:
    while True:
        time.sleep(0.1)


BAD = {
    "traceback": lambda folder: json.loads("{"),
    "hang": lambda folder: hang(),
    "crash (SIGSEGV)": lambda folder: ctypes.string_at(0),
    "crash (exit code 3)": lambda folder: os._exit(3),
    "memory": lambda folder: bytearray(b"1") * 600_000_000,
    "message": lambda folder: _refuse("a file is damaged"),
}
RUNS_CODE = {
    "evaluates a text": lambda folder: eval(CODE),
    "starts a program": lambda folder: os.system("true"),
    "uses the network": lambda folder: socket.create_connection(("127.0.0.1", 9)),
    "changes files elsewhere": lambda folder: (folder.parent.parent / "elsewhere").write_text("x"),
}


def _refuse(message: str) -> None:
    raise BadInput(message)


def failures_of(read, tmp_path, limit_s=20.0):
    """What the harness says of a reader that does `read` once its file is damaged."""

    def prepare_bad(folder):
        folder.mkdir()
        (folder / "a.json").write_text('{"a": 1}')
        valid = (folder / "a.json").read_bytes()
        return lambda folder: None if _content(folder / "a.json") == valid else read(folder)

    prepared = prepare(Reader("bad", prepare_bad), tmp_path / "valid")
    return fuzz([prepared], {"bad": 2}, tmp_path, first_seed=0, workers=1, limit_s=limit_s)["bad"].failures


def _content(path):
    return path.read_bytes() if path.is_file() and path.stat().st_size < 1e6 else None


@pytest.mark.parametrize("kind", BAD)
def test_the_harness_notices_and_keeps_the_input(tmp_path, kind):
    failures = failures_of(BAD[kind], tmp_path, limit_s=0.5 if kind == "hang" else 20.0)
    assert failures
    assert {failure.kind for failure in failures} == {kind}
    assert all((failure.folder / "input").is_dir() for failure in failures)
    assert all(json.loads((failure.folder / "report.json").read_text())["kind"] == kind for failure in failures)


@pytest.mark.parametrize("what", RUNS_CODE)
def test_the_harness_notices_what_no_reader_may_do(tmp_path, what):
    failures = failures_of(RUNS_CODE[what], tmp_path)
    assert failures
    assert {failure.kind for failure in failures} == {"code"}


def test_equal_seeds_give_equal_inputs(tmp_path):
    seen = []
    for attempt in ("first", "second"):
        work = tmp_path / attempt
        work.mkdir()
        prepared = prepare(next(reader for reader in READERS if reader.name == "results.json"), work / "valid")
        seen.append(fuzz([prepared], {"results.json": 40}, work, first_seed=3, workers=1, limit_s=30.0)["results.json"])
    assert (seen[0].accepted, seen[0].refused) == (seen[1].accepted, seen[1].refused)
