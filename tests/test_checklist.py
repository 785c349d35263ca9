"""Checks are one line each; the first failure ends the list."""

import pytest

from contracts import BadInput, SelfCheckError
from experiment.checklist import Check, Checks
from experiment.start_times import StartTimes


def failing(kind: type[Exception]) -> str:
    raise kind("what is wrong")


def test_every_result_is_one_line_and_warnings_are_logged_once_more(capsys):
    checks = Checks(StartTimes(), printed=True)
    checks.run("good", Check, "ok", "fine")
    checks.run("slow", Check, "warning", text="software rendering; unset MUJOCO_GL")
    checks.add("described", "seven parameters")
    lines = capsys.readouterr().out.splitlines()
    assert [line[:23].split() for line in lines] == [["ok", "good"], ["warning", "slow"], ["ok", "described"]]
    assert lines[1].endswith(" s  software rendering; unset MUJOCO_GL")
    summary, start, warning = checks.rows()
    assert summary == ("checks", "2 ok, 1 with a warning")
    assert start[0] == "start"
    assert warning == ("warning", "slow: software rendering; unset MUJOCO_GL")


def test_without_check_only_nothing_is_printed(capsys):
    Checks(StartTimes()).add("good", "fine")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", [BadInput, SelfCheckError, ZeroDivisionError])
def test_a_failure_passes_through(kind):
    checks = Checks(StartTimes())
    with pytest.raises(kind, match="what is wrong"):
        checks.run("fault", failing, kind)
    assert not checks.results
