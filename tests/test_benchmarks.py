"""The programs in benchmarks/ that need a GPU say so in one line."""

import signal
from importlib import import_module

import pytest
import torch

from contracts import BadInput


@pytest.mark.parametrize(
    ("program", "flags"),
    [
        ("gpu", ["--folder", "checkpoints/tiny-libero-spatial"]),
        ("smaller_card", ["23.5", "true"]),
        ("full_size", ["new"]),
    ],
)
def test_without_a_gpu_what_measures_one_is_refused(program, flags, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers would stay
    with pytest.raises(BadInput, match="torch sees no"):
        import_module(f"benchmarks.{program}").main(flags)
