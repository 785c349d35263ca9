"""Programs side by side: all are run, and on no GPU but the visible ones."""

import os

import pytest
import torch

from contracts import BadInput
from workshop.side_by_side import run_side_by_side, visible_gpus


def test_one_that_fails_does_not_keep_others_from_running(tmp_path):
    programs = {
        tmp_path / "first.log": ["-c 'raise SystemExit(3)'", "-c 'print(0)'"],
        tmp_path / "second.log": ["-c 'print(1)'"],
        tmp_path / "third.log": ["-c 'print(2)'"],
    }
    with pytest.raises(BadInput, match="ended with 3"):
        run_side_by_side(programs, at_once=1)
    assert [log.read_text().strip() for log in programs] == ["", "1", "2"]


@pytest.mark.parametrize(
    ("variable", "count", "names"),
    [(None, 2, ["0", "1"]), ("4,GPU-a", 2, ["4", "GPU-a"]), (None, 0, [None]), ("", 0, [None])],
)
def test_only_visible_gpus_take_turns(monkeypatch, variable, count, names):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(os, "environ", {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable})
    assert visible_gpus() == names
