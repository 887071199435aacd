"""Deployments that are killed: `python -m tests.support.killed_deployments MOMENT,... ARGUMENTS OF KVERN`.

This process has no engine. It forks one that deploys and kills itself at the first moment, then another that goes on
and kills itself at the next one, and at the end one that finishes. It prints how each ended.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import kvern.llm  # so that forked processes need not import it
from kvern.cli.main import main
from kvern.deploy import pipeline, plan, tune
from kvern.planning.hardware import Card
from kvern.quantize import writer

CARD = Card("CPU", 8e9, 2e9, 1e11, 1e11, host=True)
"""A speed that is the same on each machine."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(run: Callable[..., Any], calls: int = 1) -> Callable[..., Any]:
    """A function whose process dies when it has returned for the last of so many times."""
    left = calls

    def dying(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        found = run(*arguments, **options)
        left -= 1
        if not left:
            die()
        return found

    return dying


def moments() -> dict[str, Callable[[], None]]:
    """What makes a process die at each moment."""

    def at_the_end_of(stage: type) -> Callable[[], None]:
        return lambda: setattr(stage, "run", after(stage.run))  # type: ignore[attr-defined]

    found = {stage.name: at_the_end_of(type(stage)) for stage in pipeline.stages()}
    found["among weights"] = lambda: setattr(writer.Shard, "close", after(writer.Shard.close))
    found["among measurements"] = lambda: setattr(tune.Measuring, "__call__", after(tune.Measuring.__call__, 2))
    return found


def forked(arguments: list[str], prepare: Callable[[], None]) -> int:
    """The exit status of a process that runs kvern, as `waitpid` says it."""
    pid = os.fork()
    if not pid:
        prepare()
        os._exit(main(arguments))
    return os.waitpid(pid, 0)[1]


if __name__ == "__main__":
    assert kvern.llm
    plan.this_machine = lambda config, dtype: [CARD]
    _, names, *arguments = sys.argv
    for name in names.split(","):
        sys.stdout.write(f"ended {name}: {forked(arguments, moments()[name])}\n")
        sys.stdout.flush()
    sys.stdout.write(f"ended whole: {forked(arguments, lambda: None)}\n")
