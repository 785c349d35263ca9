"""What a program shows while it works: no silence, no flood, and one voice for all ranks."""

import logging

import experiment.terminal
from experiment.terminal import PERIOD_S, log_to_terminal, show_progress


def test_short_activities_one_after_the_other_are_told_as_often_as_one_long_one(monkeypatch, capsys):
    now = 1000.0
    monkeypatch.setattr(experiment.terminal.time, "monotonic", lambda: now)
    for _ in range(8):
        with show_progress("rollout", 15, "env steps") as activity:
            for _ in range(15):
                now += 1
                activity.advance(1)
    assert len(capsys.readouterr().out.splitlines()) == 8 * 15 // PERIOD_S


def test_other_ranks_warn_only_of_what_concerns_them_alone(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    log_to_terminal()
    for name in ("of_all_ranks", "envs.pool", "vla.memory"):
        logging.getLogger(name).warning("from %s", name)
    assert capsys.readouterr().err == "rank 1: from envs.pool\nrank 1: from vla.memory\n"
