"""``kvern bench accuracy``: how right the answers of configurations are, beside their speed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from kvern.cli.output import check_least, make_table, print_tables, say
from kvern.config import EngineConfig


@dataclass(frozen=True)
class AccuracyCommand:
    """Ask a model questions in several configurations, and show scores, their 95 % intervals and tokens/s.

    Questions are the exam of the embedded model, or tasks of lm-eval, where that is installed.
    """

    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="MODEL")] = None
    """Folder, Hugging Face id, or the name of an embedded model; the same as --model."""
    set: tuple[str, ...] = ()
    """Configurations, each NAME=VALUE, several with commas: quantization=none quantization=int8,kv_cache_dtype=fp8."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval. None: the exam of the embedded model."""
    num_fewshot: int | None = None
    """Examples before each question of lm-eval. None: as the task says."""
    include_path: Path | None = None
    """Folder with tasks of your own for lm-eval."""
    limit: int | None = None
    """Most questions of a task. None: all."""
    repeat: int = 1
    """Timed runs of the exam."""
    json: Path | None = None
    """Record of all scores: a file, or a folder for a new one."""
    config: Path | None = None
    """TOML or YAML file with options."""
    engine: EngineConfig = field(default_factory=EngineConfig)

    def execute(self) -> int:
        """Print the table and return the exit code. Raises KvernError."""
        from kvern.bench.accuracy import Asked, case_of, configurations
        from kvern.bench.offline import shown_config
        from kvern.bench.record import check_target, make_record, write_record

        check_least(self, "repeat", "limit")
        if self.json is not None:
            check_target(self.json)
        engine = dataclasses.replace(self.engine, model=self.name) if self.name is not None else self.engine
        asked = Asked(self.tasks, self.limit, self.num_fewshot, self.include_path, self.repeat)
        asked.check()
        cases = []
        for name, config in configurations(engine, self.set).items():
            cases.append(case_of(name, config, asked))
            say(f"{name}: {len(cases)} of {max(1, len(self.set))}")
        table = make_table(
            "configuration", "task", "metric", "score", "95 % interval", "tokens/s", words=("task", "metric")
        )
        for case in cases:
            rate = f"{case.figures['tokens_per_second'].median:,.0f}"
            for number, score in enumerate(case.details["scores"]):
                interval = "" if score["interval"] is None else "{:.4f}-{:.4f}".format(*score["interval"])
                first = (case.name, rate) if number == 0 else ("", "")
                table.add_row(first[0], score["task"], score["metric"], f"{score['value']:.4f}", interval, first[1])
        print_tables(table)
        if self.json is not None:
            record = make_record("accuracy", engine.model, cases, options=shown_config(engine))
            say(f"record: {write_record(record, self.json)}")
        return 0
