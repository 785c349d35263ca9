"""The exceptions that end a program without being faults of it."""

_LONGEST = 1500  # characters of a message: longer ones are cut in the middle


class BadInput(Exception):
    """A flag, file, checkpoint, task or machine that the program cannot use.

    The message is one line: what is wrong, what was found, what to do. The command lines print it without a
    traceback and exit with code 2. Anything else that is raised is a fault of the program (exit code 1).
    """

    def __init__(self, message: str):
        super().__init__(_one_line(message))


class TimeIsUp(Exception):
    """A run has worked for its --max-hours: it is saved and goes on with --resume (exit code 0)."""


def _one_line(message: str) -> str:
    """Names and values out of files may hold line breaks, escape sequences of terminals, or megabytes."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
    half = _LONGEST // 2
    return line if len(line) <= _LONGEST else f"{line[:half]} ... {line[-half:]}"
