"""``kvern run IN OUT``: answers a file of requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from kvern.cli.options import SamplingOptions
from kvern.cli.output import print_figures, say
from kvern.config import DEFAULT_MODEL, EngineConfig
from kvern.errors import INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvern.batch.job import BatchResult
    from kvern.llm import LLM

FAILED_ROWS = 1
CHANGES_ANSWERS = (
    "adapters",
    "tokenizer",
    "chat_template",
    "chat_template_kwargs",
    "hf_overrides",
    "generation_config",
    "override_generation_config",
)
"""Options that must be those of the beginning for a job to be continued."""


@dataclass(frozen=True)
class RunCommand:
    """Answer a file of requests. JSONL, CSV and Parquet are told apart by the names' endings, for input and output.

    A JSONL row holds a prompt or messages, and any sampling parameters; OpenAI's batch format is accepted as well.
    Answers keep the order of the input. Rows that cannot be answered go to OUT's .errors.jsonl. If it is stopped, the
    same command continues where it stopped.
    """

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="IN")]
    """File with the requests: .jsonl, .csv or .parquet."""
    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """File for the answers: .jsonl, .csv or .parquet."""
    column: str | None = None
    """Column that holds the prompts. None: prompt or messages."""
    chat: bool = False
    """Send each prompt as a user's message through the model's chat template."""
    system: str | None = None
    """System message of each conversation; implies --chat."""
    overwrite: bool = False
    """Start again even if OUT exists."""
    config: Path | None = None
    """TOML or YAML file with options, named as the flags are: max_tokens = 64."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def execute(self) -> int:
        """Run the job and return the exit code: 1 if rows failed. Raises KvernError."""
        from kvern.batch.job import BatchJob
        from kvern.batch.requests import RowRules
        from kvern.observe.metrics import DraftFigures, busiest_rows
        from kvern.request.events import EngineStatistics

        engine, usual = self.engine, EngineConfig()
        job = BatchJob(
            self.source,
            self.output,
            RowRules(self.sampling.params(), self.column, self.chat or self.system is not None, self.system),
            identity={
                "model": model_name(engine),
                "revision": engine.revision,
                "dtype": engine.dtype,
                **{name: value for name in CHANGES_ANSWERS if (value := getattr(engine, name)) != getattr(usual, name)},
            },
            seed=engine.seed,
            overwrite=self.overwrite,
        )
        with load(engine) as llm:
            llm.check_generates()
            result = job.run(llm)
            drafts = DraftFigures.between(EngineStatistics(), llm.statistics())
            print_table(result, [*drafts.rows(), *busiest_rows(llm.expert_tokens())])
        if result.interrupted:
            say(f"interrupted: {result.totals.rows} rows are done; the same command goes on from there")
            return INTERRUPTED
        if result.totals.failed:
            say(f"{result.totals.failed} rows failed: see {result.errors_path}")
            return FAILED_ROWS
        return 0


def model_name(engine: EngineConfig) -> str:
    """Returns the model's name in answers and in a job's identity; for a folder its whole path."""
    if engine.model is None:
        return DEFAULT_MODEL
    return str(Path(engine.model).resolve()) if Path(engine.model).is_dir() else engine.model


def load(engine: EngineConfig) -> LLM:
    import dataclasses

    from kvern.llm import LLM

    return LLM(**{item.name: getattr(engine, item.name) for item in dataclasses.fields(engine)})


def print_table(result: BatchResult, figures: Sequence[tuple[str, str]]) -> None:
    """Prints the final table on stdout, with more `figures` of the engine."""
    resumed = result.totals.rows - result.rows
    rows = [
        ("requests", f"{result.rows:,}" + (f" (+ {resumed:,} before)" if resumed else "")),
        ("prompt tokens", f"{result.prompt_tokens:,}"),
        ("generated tokens", f"{result.generated_tokens:,}"),
        ("seconds", f"{result.seconds:.1f}"),
        ("tokens/s", f"{result.tokens_per_second:,.0f}"),
        ("prefix-cache hit rate", f"{result.prefix_cache_hit_rate:.1%}"),
        *figures,
        ("failed rows", f"{result.totals.failed:,}"),
    ]
    print_figures("kvern run", rows, "this run")
