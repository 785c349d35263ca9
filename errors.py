"""The exceptions that end a program without being faults of it."""


class BadInput(Exception):
    """A flag, file, checkpoint, task or machine that the program cannot use.

    The message is one line: what is wrong, what was found, what to do. The command lines print it without a
    traceback and exit with code 2. Anything else that is raised is a fault of the program (exit code 1).
    """


class TimeIsUp(Exception):
    """A run has worked for its --max-hours: it is saved and goes on with --resume (exit code 0)."""
