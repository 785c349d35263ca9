"""A lock: one program at a time. That it ends with a killed one is in test_faults.py."""

import pytest

from contracts import BadInput
from experiment.file_lock import lock_file, locked


def test_a_second_program_is_refused_while_the_first_one_runs(tmp_path):
    path = tmp_path / "new" / "lock"
    with locked(path, "the run"), pytest.raises(BadInput, match="the run"):
        lock_file(path, "the run")
    with locked(path, "the run"):
        pass
    assert not path.exists()
