"""What waits for what, when a GPU computes two things at the same time."""

from contextlib import contextmanager

import pytest
import torch

from vla.two_streams import side_by_side


class Stream:
    """Of a GPU that is not there: notes what is asked."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch):
    log, current = [], []

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    current.append(Stream("main", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    return log


def computing(name, log):
    def compute():
        log.append(f"{torch.cuda.current_stream().name} computes {name}")
        return name

    return compute


def test_the_second_begins_after_all_before_it_and_ends_before_all_after_it(log):
    assert side_by_side(computing("a", log), computing("b", log), Stream("other", log)) == ("a", "b")
    asked = {line: i for i, line in enumerate(log)}
    assert len(log) == 4
    assert asked["other waits for main"] < min(asked["other computes b"], asked["main computes a"])
    assert asked["main waits for other"] > max(asked["other computes b"], asked["main computes a"])


def test_without_a_stream_one_is_computed_after_the_other(log):
    assert side_by_side(computing("a", log), computing("b", log), None) == ("a", "b")
    assert log == ["main computes a", "main computes b"]
