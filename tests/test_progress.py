"""Progress is for terminals; time spans read as people write them."""

import pytest

from rl.progress import duration, progress_bar


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (45.4, "45 s"),
        (89, "89 s"),
        (90, "2 min"),
        (720, "12 min"),
        (89 * 60, "89 min"),
        (90 * 60, "1 h 30 min"),
        (3 * 3600 + 300, "3 h 05 min"),
        (100 * 3600, "100 h 00 min"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("total", [None, 100])
def test_a_log_file_gets_nothing(total, capsys):
    with progress_bar("rollout", total) as advance:
        advance(30)
        advance(500)  # whole episodes go beyond the total
    captured = capsys.readouterr()
    assert captured.out.strip() == captured.err.strip() == ""
