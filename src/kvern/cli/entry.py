"""The entry point of the command `kvern`."""

import sys

from kvern.cli import first_engine
from kvern.cli.stderr_relay import relay_stderr
from kvern.cpu.cores import limit_spinning


def main() -> int:
    """Runs the command of `sys.argv` and returns its exit code."""
    limit_spinning()
    arguments = sys.argv[1:]
    if arguments[:1] == ["serve"] and not any(argument.startswith(("-h", "--help")) for argument in arguments):
        relay_stderr()
        first_engine.begin()
    from kvern.cli.main import main as run

    try:
        return run(arguments)
    finally:
        first_engine.kill()
