"""Run command lines of Python, each in a process of its own that finds PyTorch imported: that alone takes 8 seconds.

    python -m tests.end_to_end.forked

Reads a JSON list, what stands behind `python`, from every line of stdin, and answers with a line [exit code, output].
"""

import json
import os
import runpy
import signal
import sys
import tempfile

import preflight  # noqa: F401

LIMIT_S = 300


def execute(argv: list[str]) -> None:
    sys.argv = argv[argv[0] == "-m" :]
    if argv[0] == "-m":
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as said:
            if (child := os.fork()) == 0:
                signal.alarm(LIMIT_S)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                for stream in (1, 2):
                    os.dup2(said.fileno(), stream)
                execute(json.loads(line))
                sys.exit()
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said.seek(0)
            print(json.dumps([code, said.read()]), flush=True)
