"""``kvern deploy``: from a model's name to a folder that was planned, quantized if need be, tuned and verified."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from kvern.cli.output import check_least, print_lines, refuse, say
from kvern.cli.quantize import share_of
from kvern.deploy.description import NAME
from kvern.deploy.journal import UNFINISHED, place_of
from kvern.errors import ConfigError

if TYPE_CHECKING:
    from kvern.deploy.stage import Asked


@dataclass(frozen=True)
class DeployCommand:
    """Make a bundle of a model for this machine: plan, quantize if memory or the target asks for it, tune and verify.

    kvern serve OUT serves it. A run that was interrupted goes on with the same command. The exit code is 1 if a number
    missed its limit.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Folder, hub id, or embedded model; or the deploy.toml of a bundle, which is made again."""
    out: Path | None = None
    """Folder for the bundle."""
    revision: str | None = None
    """Branch, tag or commit of the Hugging Face repository."""
    max_loss: str | None = None
    """Growth of the perplexity that fewer bits may cause, such as 1%. None: weights stay as they are."""
    target: str | None = None
    """Limits for 99 of 100 tokens, such as "ttft 500ms, itl 30ms"."""
    workload: str | None = None
    """Workload to tune for: one of kvern bench, a file of token ids or of a recorded load, or a load such as
    rate=4,requests=200. None: mixed256 on a GPU, 16 requests on a CPU."""
    memory: str | None = None
    """Memory of each device that may be used, such as 40GB. None: what is free."""
    calibration: Path | None = None
    """Text, or JSONL of messages, prompts or texts; a fifth of it is kept for verification. None: kvern's own
    conversations."""
    tune_seconds: float = 480.0
    """Time after which no further configuration is measured."""
    repetitions: int = 7
    """Most runs of a configuration, at least 3; fewer where they agree."""
    overwrite: bool = False
    """Replace a bundle that has other options, when the new one is complete; or go on in an unfinished one."""

    def execute(self) -> int:
        """Makes the bundle and returns the exit code. Raises KvernError."""
        from kvern.deploy.pipeline import deploy
        from kvern.deploy.report import PAGE

        check_least(self, "repetitions", least=3)
        asked = self._asked()
        place, _ = place_of(asked.out)
        outcome = deploy(asked, self.overwrite, say)
        page = outcome.work.folder / PAGE
        if outcome.failed:
            print_lines(*(f"failed: {line}" for line in outcome.failed), f"report: {page}")
            if outcome.work.folder != asked.out:
                say(f"{asked.out} is the bundle that it was")
            return 1
        try:
            os.getcwd()
        except FileNotFoundError:
            say(f"the working directory was in the bundle that was replaced: enter it again by cd {place}")
        print_lines(
            f"kvern serve {asked.out}", f"report: {page}", f"again: kvern deploy {asked.out / NAME} --out ANOTHER"
        )
        return 0

    def _again(self, out: Path) -> Asked:
        """Returns what makes a bundle again, and says if it is tuned anew."""
        from kvern.deploy.again import same
        from kvern.deploy.description import read_bundle

        own = ("revision", "max_loss", "target", "workload", "memory", "calibration")
        refuse(self, DeployCommand, own, "the bundle that is made again says it")
        bundled = read_bundle(Path(self.model).parent)
        if (bundled.folder / UNFINISHED).exists():
            raise ConfigError(f"{bundled.folder} is an unfinished bundle: the command that began it goes on with it")
        if out.exists() and out.samefile(bundled.folder):
            raise ConfigError(f"out {out} is the bundle itself: give another folder")
        if apart := bundled.differences():
            say(f"{bundled.folder} was tuned elsewhere ({apart}): it is tuned again")
        return dataclasses.replace(same(bundled, out), tune_seconds=self.tune_seconds, repetitions=self.repetitions)

    def _asked(self) -> Asked:
        from kvern.deploy.stage import Asked, read_target
        from kvern.quantize.mixed import Budget
        from kvern.tiers.store import read_bytes

        if self.out is None:
            raise ConfigError("out is missing: give a folder for the bundle, as in --out bundle")
        if not self.tune_seconds >= 0:
            raise ConfigError(f"tune_seconds is {self.tune_seconds:g}: it must be 0 or more")
        place_of(self.out)
        if Path(self.model).name == NAME:
            return self._again(self.out)
        loss = None if self.max_loss is None else Budget(loss=share_of(self.max_loss)).loss
        try:
            memory = None if self.memory is None else read_bytes(self.memory)
        except ValueError as error:
            raise ConfigError(f"memory: {error}") from None
        return Asked(
            self.model,
            self.out,
            self.revision,
            loss,
            read_target(self.target),
            self.workload,
            memory,
            self.calibration,
            self.tune_seconds,
            self.repetitions,
        )
