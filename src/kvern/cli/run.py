"""``kvern run IN OUT``: answers a file of requests."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from kvern.cli.options import SamplingOptions
from kvern.cli.output import print_figures, say
from kvern.config import DEFAULT_MODEL, EngineConfig
from kvern.errors import INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvern.batch.job import BatchResult
    from kvern.llm import LLM

FAILED_ROWS = 1
STREAM = Path("-")
"""The name of stdin or stdout in the place of a file."""
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
    same command continues where it stopped. The name - is stdin or stdout, in JSONL; then figures and rows that cannot
    be answered go to stderr, and nothing is continued.
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
    media_dir: Path | None = None
    """Folder of images that rows may name by paths below it. None: rows hold their images themselves."""
    config: Path | None = None
    """TOML or YAML file with options, named as the flags are: max_tokens = 64."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def execute(self) -> int:
        """Run the job and return the exit code: 1 if rows failed. Raises KvernError."""
        with job_files(self.source, self.output) as (source, output):
            return self._run(source, output)

    def _run(self, source: Path, output: Path) -> int:
        from kvern.batch.images import ImageFolder
        from kvern.batch.job import BatchJob
        from kvern.batch.requests import RowRules
        from kvern.observe.metrics import DraftFigures, busiest_rows
        from kvern.request.events import EngineStatistics
        from kvern.request.store_figures import store_rows

        engine, usual = self.engine, EngineConfig()
        job = BatchJob(
            source,
            output,
            RowRules(self.sampling.params(), self.column, self.chat or self.system is not None, self.system),
            identity={
                "model": model_name(engine),
                "revision": engine.revision,
                "dtype": engine.dtype,
                **{name: value for name in CHANGES_ANSWERS if (value := getattr(engine, name)) != getattr(usual, name)},
            },
            seed=engine.seed,
            overwrite=self.overwrite,
            images=None if self.media_dir is None else ImageFolder(self.media_dir),
        )
        with load(engine) as llm:
            llm.check_generates()
            result = job.run(llm)
            found = llm.statistics()
            drafts = DraftFigures.between(EngineStatistics(), found)
            figures = [*drafts.rows(), *store_rows(found.stores), *busiest_rows(llm.expert_tokens())]
            print_table(result, figures, self.output == STREAM)
        if result.interrupted:
            again = "" if STREAM in (self.source, self.output) else "; the same command goes on from there"
            say(f"interrupted: {result.totals.rows} rows are done{again}")
            return INTERRUPTED
        if result.totals.failed:
            where = "they stand below" if self.output == STREAM else f"see {result.errors_path}"
            say(f"{result.totals.failed} rows failed: {where}")
            return FAILED_ROWS
        return 0


@contextlib.contextmanager
def job_files(source: Path, output: Path) -> Iterator[tuple[Path, Path]]:
    """Yields the files of a job. Temporary ones stand for stdin and stdout, to which answers go when the job ends."""
    if STREAM not in (source, output):
        yield source, output
        return
    with tempfile.TemporaryDirectory(prefix="kvern-run-") as name:
        folder = Path(name)
        if source == STREAM:
            source = folder / "requests.jsonl"
            with source.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        if output != STREAM:
            yield source, output
            return
        answers = folder / "answers.jsonl"
        try:
            yield source, answers
        finally:
            for made, stream in ((answers, sys.stdout), (folder / "answers.errors.jsonl", sys.stderr)):
                if made.is_file():
                    stream.flush()
                    stream.buffer.write(made.read_bytes())


def model_name(engine: EngineConfig) -> str:
    """Returns the model's name in answers and in a job's identity; for a folder its whole path."""
    if engine.model is None:
        return DEFAULT_MODEL
    return str(Path(engine.model).resolve()) if Path(engine.model).is_dir() else engine.model


def check_files(engine: EngineConfig) -> None:
    """Raises KvernError if the model's name or files on this machine are wrong. Imports no PyTorch."""
    from kvern.models.folder import model_folder
    from kvern.models.hub import local_model

    if engine.model is not None and local_model(engine.model) is not None:
        model_folder(engine)


def load(engine: EngineConfig) -> LLM:
    """Returns the loaded model. Raises KvernError."""
    import dataclasses

    check_files(engine)
    from kvern.llm import LLM

    return LLM(**{item.name: getattr(engine, item.name) for item in dataclasses.fields(engine)})


def print_table(result: BatchResult, figures: Sequence[tuple[str, str]], on_stderr: bool) -> None:
    """Prints the final table, with more `figures` of the engine."""
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
    print_figures("kvern run", rows, "this run", on_stderr)
