"""Checks and their findings: each is one line, failures stop a run and are collected by --check-only."""

import pytest

from errors import BadInput
from findings import Caution, Checks
from rl.selfcheck import SelfCheckError


def failing(failure: Exception):
    def check(*_):
        raise failure

    return check


def test_a_run_stops_at_the_first_failure_and_prints_nothing(capsys):
    checks = Checks()
    checks.make("first", lambda: "fine")
    with pytest.raises(BadInput, match="driver is missing; run: apt-get"):
        checks.make("second", failing(BadInput("driver is missing; run: apt-get")))
    assert [finding.check for finding in checks.findings] == ["first"]
    assert capsys.readouterr().out == ""


def test_every_finding_is_one_line_that_is_readable_without_colours(capsys):
    checks = Checks(show_all=True)
    checks.make("good", lambda: "fine")
    checks.make("slow", lambda: Caution("software rendering; unset MUJOCO_GL"))
    checks.make("broken", failing(BadInput("no such folder: " + "long " * 60)))
    checks.make("wrong", failing(SelfCheckError("disagree")))
    checks.make("dependent", lambda _: "never made", None)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["ok", "good"],
        ["warning", "slow"],
        ["FAILED", "broken"],
        ["FAILED", "wrong"],
        ["skipped", "dependent"],
    ]
    assert all("0.0 s" in line and "\x1b" not in line for line in lines)
    assert "long " * 59 in lines[2]  # a command is never broken over lines


def test_a_value_is_handed_on_only_when_its_description_is_no_failure():
    checks = Checks(show_all=True)
    assert checks.obtain("number", lambda: 3, str) == 3
    assert checks.obtain("described badly", lambda: 3, failing(BadInput("bad"))) is None
    assert checks.obtain("next", lambda number: number + 1, str, 3) == 4
    assert checks.obtain("after a failure", lambda number: number + 1, str, None) is None
    assert [finding.status for finding in checks.findings] == ["ok", "FAILED", "ok", "skipped"]
    assert checks.passed("number", "next")
    assert checks.passed("number", "described badly") is None
    assert checks.passed("after a failure") is None


def test_a_fault_that_nobody_expected_leaves_the_other_checks_standing(capsys, caplog):
    checks = Checks(show_all=True)
    checks.make("odd", failing(ZeroDivisionError("by zero\nsecond line")))
    checks.make("next", lambda: "fine")
    assert "ZeroDivisionError: by zero (its traceback is above" in capsys.readouterr().out
    assert "Traceback" in caplog.text
    with pytest.raises(ZeroDivisionError):
        Checks().make("odd", failing(ZeroDivisionError("by zero")))


def test_the_sum_counts_all_kinds_and_a_failure_is_bad_input(capsys):
    checks = Checks(show_all=True)
    checks.make("good", lambda: "fine")
    checks.make("slow", lambda: Caution("slow"))
    checks.conclude()
    assert "2 checks in 0.0 s: 1 ok, 1 warning" in capsys.readouterr().out
    checks.make("broken", failing(BadInput("no GPU; run: nvidia-smi")))
    with pytest.raises(BadInput, match=r"1 of 3 checks FAILED; broken: no GPU; run: nvidia-smi"):
        checks.conclude()


def test_other_ranks_are_silent(capsys):
    checks = Checks(show_all=True, silent=True)
    checks.make("good", lambda: "fine")
    checks.conclude()
    assert capsys.readouterr().out == ""
