"""One program at a time: the second is told who the first is, and no end of the first leaves a lock behind."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import eval as eval_program
from errors import BadInput
from locks import Lock, check_unlocked, sole_writer

ROOT = Path(__file__).parents[1]
HOLDER = """
import subprocess, sys
from pathlib import Path
from locks import Lock
lock = Lock(Path(sys.argv[1]), "it")
child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)  # outlives us
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / ".lock"


@pytest.fixture
def holder(path):
    """Another process that holds the lock, and the id of a process that it started meanwhile."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        yield process
        process.kill()
    os.kill(child, signal.SIGKILL)


def test_the_second_is_told_process_and_host_of_the_first(path, holder):
    expected = (
        f"runs/R is being written by process {holder.pid} on {socket.gethostname()}: wait for its end, or stop it"
    )
    for attempt in (Lock, check_unlocked):
        with pytest.raises(BadInput) as refused:
            attempt(path, "runs/R")
        assert str(refused.value) == expected


def test_kill_9_frees_the_lock_though_a_child_of_the_killed_lives_on(path, holder):
    holder.kill()
    holder.wait()
    check_unlocked(path, "it")
    Lock(path, "it").release()


def test_asking_takes_nothing(path):
    check_unlocked(path, "it")  # there is no file
    assert not path.exists()
    Lock(path, "it").release()
    check_unlocked(path, "it")
    lock = Lock(path, "it")
    assert path.read_text() == f"process {os.getpid()} on {socket.gethostname()}"  # once, not added to the first
    lock.release()


def test_a_file_system_without_locks_is_said_and_no_obstacle(monkeypatch, caplog, path):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    Lock(path, "it").release()
    assert "this file system has no locks" in caplog.text


def test_another_error_of_the_disk_is_one(monkeypatch, path):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="Input/output"):
        Lock(path, "it")


def test_a_results_file_has_one_writer(tmp_path):
    out = tmp_path / "new" / "r.json"
    with (
        sole_writer(out, "--out r.json"),
        pytest.raises(BadInput, match=r"--out .*r\.json is being written by process"),
    ):
        eval_program.main(["--checkpoint", "nowhere", "--device", "cpu", "--task-id", "0", "--out", str(out)])
    with sole_writer(out, "--out r.json"):  # free again
        pass


def test_a_place_that_takes_no_lock_file_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(BadInput, match=r"--out x: cannot be written \("),
        sole_writer(tmp_path / "file" / "r", "--out x"),
    ):
        pass
