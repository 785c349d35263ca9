"""A lock: one program at a time; it ends with its program."""

import subprocess
import sys
from pathlib import Path

import pytest

from contracts import BadInput
from experiment.file_lock import lock_file, locked

ROOT = Path(__file__).parents[1]
KILLED = """
import os, signal, sys
from pathlib import Path
from experiment.file_lock import lock_file
lock = lock_file(Path(sys.argv[1]), "the run")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_second_program_is_refused_while_the_first_one_runs(tmp_path):
    path = tmp_path / "new" / "lock"
    with locked(path, "the run"), pytest.raises(BadInput, match="the run is being written"):
        lock_file(path, "the run")
    with locked(path, "the run"):
        pass


def test_the_lock_of_a_killed_program_is_free(tmp_path):
    path = tmp_path / "lock"
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT).returncode == -9
    assert path.exists()
    with locked(path, "the run"):
        pass
