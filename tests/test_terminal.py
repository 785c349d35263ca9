"""What a program shows while it works: how far it is, how long it will take, and no silence."""

import logging

import pytest

import experiment.terminal
from experiment.terminal import PERIOD_S, Activity, duration, log_to_terminal, show_progress


@pytest.fixture
def now(monkeypatch):
    """A clock that a test sets: `now["s"]`."""
    clock = {"s": 1000.0}
    monkeypatch.setattr(experiment.terminal.time, "monotonic", lambda: clock["s"])
    return clock


def test_an_activity_says_how_far_it_is_and_how_long_it_will_take_at_the_same_pace(now):
    activity = Activity("evaluation", 50, "episodes")
    for success in [True] * 8 + [False] * 15:
        activity.count_episode(success)
    now["s"] += 46
    assert str(activity) == "evaluation: 23/50 episodes, 8 succeeded, 54 s left"
    learning = Activity("learning", 18_000, "decisions", done=18_500)
    assert str(learning) == "learning: 18,000/18,000 decisions, finishing"
    assert [duration(seconds) for seconds in (9, 70, 12_000)] == ["9 s", "1 min", "3 h 20 min"]


def test_short_activities_one_after_the_other_are_told_as_often_as_one_long_one(now, capsys):
    for _ in range(8):
        with show_progress("rollout", 15, "env steps") as activity:
            for _ in range(15):
                now["s"] += 1
                activity.advance(1)
    assert len(capsys.readouterr().out.splitlines()) == 8 * 15 // PERIOD_S
    with show_progress("rollout", 15, "env steps", shown=False) as activity:
        now["s"] += PERIOD_S
        activity.advance(1)
    assert capsys.readouterr().out == ""


def test_other_ranks_warn_only_of_what_concerns_them_alone(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    log_to_terminal()
    for name in ("of_all_ranks", "envs.pool", "vla.memory"):
        logging.getLogger(name).warning("from %s", name)
    assert capsys.readouterr().err == "rank 1: from envs.pool\nrank 1: from vla.memory\n"
