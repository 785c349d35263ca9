"""What a program shows while it works: how far it is, how long it will take, and no silence."""

import logging
import threading

import pytest

import experiment.terminal
from experiment.terminal import PERIOD_S, Activity, clock, log_to_terminal, print_due_lines, show_progress


@pytest.fixture
def now(monkeypatch):
    """A clock that a test sets: `now["s"]`."""
    clock = {"s": 1000.0}
    monkeypatch.setattr(experiment.terminal.time, "monotonic", lambda: clock["s"])
    return clock


def test_an_activity_says_how_far_it_is_and_how_long_it_will_take_at_the_same_pace(now):
    activity = Activity("evaluation", 50, "episodes", started=now["s"])
    assert str(activity) == "evaluation: 0/50 episodes"
    activity.count_episode(True)
    assert str(activity) == "evaluation: 1/50 episodes, 1 success, 0:00 left"
    for success in [True] * 7 + [False] * 15:
        activity.count_episode(success)
    now["s"] += 60
    assert str(activity) == "evaluation: 23/50 episodes, 8 successes, 1:10 left"
    learning = Activity("learning", 18_000, "decisions")
    learning.advance(18_500)
    assert str(learning) == "learning: 18,000/18,000 decisions, finishing"
    assert [clock(seconds) for seconds in (9, 70, 7_270)] == ["0:09", "1:10", "2:01:10"]


def test_short_activities_one_after_the_other_are_told_as_often_as_one_long_one(now):
    lines = []
    for _ in range(8):
        activity = Activity("rollout", 10, "env steps", asked_at=now["s"])
        for _ in range(15):
            now["s"] += 1
            lines.append(activity.due_line())
    told = [line for line in lines if line is not None]
    assert len(told) == 8 * 15 // PERIOD_S


def test_lines_are_printed_while_a_block_lasts_and_never_after_it(capsys):
    is_told = threading.Event()

    def due_line() -> str:
        is_told.set()
        return "still here"

    with print_due_lines(due_line):
        assert is_told.wait(30)
    shown = capsys.readouterr().out
    assert shown.startswith("still here\n")
    with (
        print_due_lines(due_line, shown=False),
        show_progress("reading", 3, "episodes", shown=False) as activity,
    ):
        activity.advance(3)
    assert capsys.readouterr().out == ""


def test_other_ranks_warn_only_of_what_concerns_them_alone(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(logging.root, "handlers", [])
    log_to_terminal()
    for name in ("of_all_ranks", "envs.pool", "vla.memory"):
        logging.getLogger(name).warning("from %s", name)
    assert capsys.readouterr().err == "rank 1: from envs.pool\nrank 1: from vla.memory\n"
