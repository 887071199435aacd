"""``kvern bench steps``: a load on an engine, with a record of its steps for simulations."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from kvern.cli.output import print_figures, say
from kvern.config import EngineConfig
from kvern.errors import ConfigError


@dataclass(frozen=True)
class StepsCommand:
    """Run a load on an engine in this process, each request at its time, and record the work and time of each step.

    `kvern simulate --record` fits its costs to such records. Prompts are random tokens, and answers end where the load
    says."""

    load: str | None = None
    """File with the requests, one a line, as in Mooncake's traces, or what to draw: rate=2,requests=1000."""
    output: Path | None = None
    """File for the record."""
    slo: str | None = None
    """Limits of good answers, such as ttft=500ms,itl=20ms,e2e=5s."""
    json: bool = False
    """Print the figures as JSON."""
    config: Path | None = None
    """TOML or YAML file with options."""
    engine: EngineConfig = field(default_factory=EngineConfig)

    def execute(self) -> int:
        """Runs the load, prints its figures and returns the exit code. Raises KvernError."""
        from kvern.bench.record import check_target
        from kvern.bench.steps import MeasuredEngine
        from kvern.cli.simulate import ROWS
        from kvern.loads.source import read_load
        from kvern.simulate.records import write_steps
        from kvern.simulate.report import figures, read_slo

        slo = read_slo(self.slo)
        if self.load is None:
            raise ConfigError("there is nothing to run: give --load, a file or what to draw, like rate=2,requests=1000")
        load = list(read_load(self.load))
        if self.output is not None:
            check_target(self.output, "output")
            if self.output.is_dir():
                raise ConfigError(f"output is {self.output}, a folder: name a file in it, such as steps.jsonl")
        measured = MeasuredEngine(self.engine)
        measured.warm()
        record, engine = measured.run(load)
        measured.close()
        found = figures([engine.timeline], slo, engine.hit_tokens, [engine.executor.busy])
        if self.json:
            sys.stdout.write(json.dumps(found, indent=1) + "\n")
        else:
            rows = ((name.replace("_", " "), format(found[name], form)) for name, form in ROWS.items() if name in found)
            print_figures(f"kvern bench steps: {record.header.model} on {record.header.hardware}", rows, "value")
        if self.output is not None:
            write_steps(record, self.output)
            say(f"record: {self.output}, {len(record.steps)} steps")
        return 0
