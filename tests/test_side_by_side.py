"""Programs side by side: all are run, on no GPU but the visible ones, and on one that is free."""

import os
from threading import Event

import pytest
import torch

from contracts import BadInput
from workshop import side_by_side
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


def test_a_program_takes_the_gpu_that_was_given_back(tmp_path, monkeypatch):
    gpu_of = {}
    last_has_begun = Event()

    def pretend(log, programs, gpu):
        gpu_of[log.stem] = gpu
        if log.stem == "last":
            last_has_begun.set()
        elif log.stem == "long":
            last_has_begun.wait(10)

    monkeypatch.setattr(side_by_side, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(side_by_side, "run", pretend)
    run_side_by_side({tmp_path / f"{name}.log": [] for name in ("long", "short", "last")}, at_once=2)
    assert gpu_of["last"] == gpu_of["short"] != gpu_of["long"]


@pytest.mark.parametrize(
    ("variable", "count", "names"),
    [(None, 2, ["0", "1"]), ("4,GPU-a", 2, ["4", "GPU-a"]), (None, 0, [None]), ("", 0, [None])],
)
def test_only_visible_gpus_take_turns(monkeypatch, variable, count, names):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(os, "environ", {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable})
    assert visible_gpus() == names
