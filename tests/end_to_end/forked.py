"""Run command lines of Python, each in a process of its own that finds PyTorch imported: that alone takes 8 seconds.

    python -m tests.end_to_end.forked

Reads from every line of stdin a JSON list, the arguments of `python`, and answers with a line [exit code, output].
"""

import json
import os
import runpy
import signal
import sys
import tempfile

import preflight  # noqa: F401  # imported once, here, for all of them

LIMIT_S = 300


def execute(argv: list[str]) -> None:
    """Do what `python ARGV` does."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


def execute_in_fork(argv: list[str]) -> tuple[int, str]:
    """Exit code and output of the command line; a child that takes longer than LIMIT_S is ended by its alarm."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            signal.alarm(LIMIT_S)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            execute(argv)
            sys.exit()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return code, output.read()


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(execute_in_fork(json.loads(line))), flush=True)
