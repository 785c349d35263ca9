"""A lock: one program at a time, on any disk; it ends with its program, or says how to remove it."""

import errno
import fcntl
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from contracts import BadInput
from experiment.file_lock import lock_file

ROOT = Path(__file__).parents[1]


@pytest.fixture(params=["flock", errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def disk(request, monkeypatch):
    """A disk with flock, or one that answers it with an error."""
    if request.param != "flock":
        without_flock(monkeypatch, request.param)
    return request.param


def without_flock(monkeypatch, error_number: int = errno.ENOSYS) -> None:
    def flock(*_):
        raise OSError(error_number, os.strerror(error_number))

    monkeypatch.setattr(fcntl, "flock", flock)


def owner_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_a_lock_names_its_owner_and_leaves_nothing_behind(disk, tmp_path):
    path = tmp_path / "new" / "lock"
    lock = lock_file(path, "the run")
    assert owner_of(path) == [str(os.getpid()), socket.gethostname()]
    lock.close()
    lock.close()
    assert list(path.parent.iterdir()) == []
    lock_file(path, "the run").close()


def test_a_second_program_is_refused_while_the_first_one_runs(disk, monkeypatch, tmp_path):
    path = tmp_path / "lock"
    lock = lock_file(path, "the run")
    if disk != "flock":
        monkeypatch.setattr(os, "getpid", lambda: -1)  # another process
    with pytest.raises(BadInput, match=f"process {owner_of(path)[0]} on {socket.gethostname()}"):
        lock_file(path, "the run")
    lock.close()


def test_the_lock_of_a_killed_program_is_taken_over(disk, tmp_path):
    killed = subprocess.Popen([sys.executable, "-c", "import os; os.abort()"], stderr=subprocess.DEVNULL)
    path = tmp_path / "lock"
    path.write_text(f"{killed.pid}\n{socket.gethostname()}\n")
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # ended, but still in the table of processes
    lock_file(path, "the run").close()
    killed.wait()
    path.write_text(f"{killed.pid}\n{socket.gethostname()}\n")
    lock_file(path, "the run").close()


@pytest.mark.parametrize("content", ["12\nanother-node\n", ""])
def test_without_flock_one_line_says_how_to_remove_the_lock_of_another_machine(
    monkeypatch, tmp_path, content
):
    without_flock(monkeypatch)
    path = tmp_path / "lock"
    path.write_text(content)
    named = "process 12 on another-node" if content else "unknown process"
    with pytest.raises(BadInput, match=rf"{named}.*delete {path}"):
        lock_file(path, "the run")
    assert path.read_text() == content
    path.unlink()
    lock_file(path, "the run").close()


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BadInput, match="--out"):
        lock_file(tmp_path / "file" / "lock", "--out x")


def test_a_full_disk_is_refused_and_keeps_no_empty_lock(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # the kernel refuses every byte of a file
    try:
        with pytest.raises(BadInput, match="--out"):
            lock_file(tmp_path / "lock", "--out x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
