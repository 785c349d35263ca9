"""What importing timm does without."""

import importlib
import sys

import pytest

from vla.lean_timm import _as_if_missing


@pytest.fixture
def unknown(monkeypatch, tmp_path):
    """The name of a module that exists and has not been imported."""
    (tmp_path / "a_tracker.py").write_text("runs = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "a_tracker"
    sys.modules.pop("a_tracker", None)


def test_a_module_is_missing_inside_and_there_afterwards(unknown):
    with _as_if_missing(unknown), pytest.raises(ImportError):
        importlib.import_module(unknown)
    assert importlib.import_module(unknown).runs == []


def test_a_module_that_is_in_use_stays(unknown):
    module = importlib.import_module(unknown)
    with _as_if_missing(unknown):
        assert importlib.import_module(unknown) is module
    assert sys.modules[unknown] is module
