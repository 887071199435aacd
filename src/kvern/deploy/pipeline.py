"""Runs the stages one after another, or takes what stands of an earlier run."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from kvern.deploy.bundle import Bundle
from kvern.deploy.discover import Discover
from kvern.deploy.journal import Journal, key_of
from kvern.deploy.plan import Plan
from kvern.deploy.quantize import Quantize, check_files
from kvern.deploy.report import Section, write_report
from kvern.deploy.shard import Shard
from kvern.deploy.stage import Asked, Stage, Work
from kvern.deploy.tune import Tune
from kvern.deploy.verify import Verify
from kvern.errors import ConfigError, KvernError
from kvern.io.files import reason
from kvern.version import __version__

WITHOUT_WORK = 2
"""The stages that take seconds, of which no results are kept if one of them refuses its input."""
CHECKS = 3
"""The stages that change nothing in a bundle that is there."""


def stages() -> list[Stage]:
    """Returns the stages in their order."""
    return [Discover(), Plan(), Shard(), Quantize(), Tune(), Verify(), Bundle()]


class Outcome(NamedTuple):
    """The end of a deployment: lines about numbers that missed their limits, if any, and the report's sections."""

    failed: list[str]
    sections: list[Section]
    work: Work


def deploy(asked: Asked, overwrite: bool, say: Callable[[str], None], chosen: Sequence[Stage] | None = None) -> Outcome:
    """Makes a bundle, or goes on with it; one that is whole stays so until the new one is. Raises KvernError."""
    chosen = stages() if chosen is None else chosen
    check_files(asked)
    journal = Journal(asked.out)
    sections: list[Section] = []
    failed: list[str] = []
    is_new = not journal.recover()
    with journal.held(asked.identity, overwrite):
        work = Work(asked, journal, say)
        for number, stage in enumerate(chosen, 1):
            said = f"[{number}/{len(chosen)}] {stage.name}"
            before = {type(item).__name__: item for item in work.results.values()}
            try:
                key = key_of(__version__, stage.name, stage.inputs(work), before)
                result, seconds = _stage(stage, key, work, said, number > CHECKS or journal.is_new)
            except (KvernError, OSError) as error:
                if (is_new or journal.is_copy) and number <= WITHOUT_WORK:
                    journal.remove()  # nothing is lost, and the next try may have other options
                if isinstance(error, KvernError):
                    raise
                raise ConfigError(f"{stage.name} stopped: {error.filename or asked.out}: {reason(error)}") from None
            work.results[stage.result] = result
            sections.append(Section(stage.name, result, seconds, stage.report(result)))
            if failed := list(getattr(result, "failed", ())):
                write_report(work, sections, failed)
                break
        else:
            write_report(work, sections, failed)
            journal.finish()
    return Outcome(failed, sections, work)


def _stage(stage: Stage, key: str, work: Work, said: str, notes: bool) -> tuple[Any, float]:
    """Returns the result of a stage and its seconds, from the journal if it stands there.

    `notes`: from now on the bundle counts as unfinished.
    """
    found: tuple[msgspec.Struct, float] | None = work.journal.read(stage.name, key, stage.result)
    if found is not None and not getattr(found[0], "failed", ()) and stage.stands(work, found[0]):
        work.say(f"{said}: done before")
        return found
    if notes:
        work.journal.begin(stage.name)
    work.say(f"{said} ...")
    begun = time.monotonic()
    result = stage.run(work)
    seconds = time.monotonic() - begun
    work.journal.write(stage.name, key, result, seconds)
    for name, value in stage.report(result).rows:
        work.say(f"    {name}: {value}")
    work.say(f"{said}: {seconds:.1f} s")
    return result, seconds
