"""One batch job: answers rows in order through one engine that works on many rows at once.

  reader --row--> request --as_completed--> engine --output--> waiting --in order--> journal --> output file

Rows finish in any order and are written in the input's order; a finished row waits in memory for earlier ones. At most
``WINDOW`` rows lie between the oldest unwritten row and the newest started one, so memory is bounded.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvern.api.error_bodies import as_sent
from kvern.api.other_names import sent_names
from kvern.batch.journal import FinishedRow, Journal, Totals
from kvern.batch.readers import Reader, Row, checked_ending, content_digest, import_pyarrow, open_reader
from kvern.batch.requests import BatchRequest, RowRules, is_openai_row, merged, read_openai_row
from kvern.batch.tables import write_table
from kvern.errors import BatchFileError, InvalidRequest, KvernError
from kvern.io.json_lines import json_line
from kvern.io.progress import generation_progress
from kvern.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvern.batch.images import ImageFolder
    from kvern.engine.inputs import Prompt
    from kvern.llm import LLM, FailedRequest
    from kvern.request.outputs import RequestOutput
    from kvern.text.tokenizer import Tokenizer
    from kvern.tools.chat import ChatRequest

WINDOW = 8192
FAILED_BEFORE_WRITING = 256  # rows that fail at once, without a step of the engine between them


@dataclass(frozen=True)
class BatchResult:
    """The result of a job: ``totals`` count the whole job, the other numbers this run. Times are in seconds."""

    totals: Totals
    rows: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    seconds: float
    interrupted: bool
    errors_path: Path

    @property
    def prefix_cache_hit_rate(self) -> float:
        """The share of this run's prompt tokens that came from the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds else 0.0


@dataclass
class StartedRow:
    """A row that the engine is answering."""

    place: int
    row: Row
    request: BatchRequest
    chat: ChatRequest | None

    @property
    def prompt(self) -> Prompt:
        """The prompt for the engine."""
        prompt = self.request.prompt if self.chat is None else self.chat.prompt
        assert prompt is not None
        return prompt

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters, with those of the conversation."""
        return self.request.params if self.chat is None else self.chat.params


@dataclass
class BatchJob:
    """A job between two files.

    Args:
        source, output: ``.jsonl``, ``.csv`` or ``.parquet``, each by its own ending.
        rules: how plain rows are read.
        identity: further values that must be equal to continue an unfinished output (model, dtype, ...).
        images: the folder of images that rows name by paths; None: they name none.
        seed: rows without a seed derive theirs from this and their number, so that a resumed job gives the same
            answers.

    Raises:
        BatchFileError: one of the files cannot be used; nothing has been written then.
    """

    source: Path
    output: Path
    rules: RowRules
    identity: Mapping[str, Any]
    seed: int = 0
    overwrite: bool = False
    images: ImageFolder | None = None
    reader: Reader = field(init=False)
    journal: Journal = field(init=False)

    def __post_init__(self) -> None:
        ending = checked_ending(self.output, "output")
        if ending == ".parquet":
            import_pyarrow("pyarrow")
        self.reader = open_reader(self.source)
        if self.output.exists() and self.output.samefile(self.source):
            raise BatchFileError(f"output {self.output} is the input itself: choose another name")
        if self.reader.columns is not None:
            self.rules.check_columns(self.reader.columns, f"input {self.source}")
            self.rules = replace(self.rules, fields_are_parameters=False)
        self._as_lines = ending in (".jsonl", ".ndjson")
        same = {
            "input": content_digest(self.source),
            **self.identity,
            "column": self.rules.column,
            "chat": self.rules.chat,
            "system": self.rules.system,
            **msgspec.to_builtins(self.rules.params, str_keys=True),
            "seed": self.seed,
        }
        self.journal = Journal(self.output, append=self._as_lines, identity=same)
        self.journal.check(self.overwrite)
        self._begun: dict[str, StartedRow] = {}
        self._finished: dict[int, FinishedRow] = {}
        self._cached_tokens = 0
        self._read = self._written = self._place = 0

    def run(self, llm: LLM) -> BatchResult:
        """Answers the rows that are not done yet. Ctrl-C ends it early and writes all finished rows."""
        self.journal.open(self.overwrite)
        try:
            return self._run(llm)
        finally:
            self.journal.close()

    def _run(self, llm: LLM) -> BatchResult:
        before = self.journal.record.done
        started = time.perf_counter()
        interrupted = False
        if not self.journal.record.finished:
            try:
                with generation_progress(self.reader.count(), before.rows) as report:
                    self._answer_all(llm, report)
                if not self._as_lines:
                    self.journal.commit(sync=True)
                    write_table(self.reader, self.journal.answers_path, self.journal.table_path, self.output)
                self.journal.finish()
            except KeyboardInterrupt:
                interrupted = True
                self._write_in_order()
                self._commit()
        done = self.journal.record.done
        return BatchResult(
            totals=done,
            rows=done.rows - before.rows,
            prompt_tokens=done.prompt_tokens - before.prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=done.generated_tokens - before.generated_tokens,
            seconds=time.perf_counter() - started,
            interrupted=interrupted,
            errors_path=self.journal.errors_path,
        )

    def _answer_all(self, llm: LLM, report: Callable[[int, int], None]) -> None:
        before = self.journal.record.done
        self._place = self._written = before.rows
        rows = iter(self.reader)
        for _ in range(before.rows):
            next(rows)
        exhausted = False

        def inputs() -> Iterator[tuple[str, Prompt, SamplingParams, str | None]]:
            """Yields the next rows for the engine; ends early while too many finished rows wait for an older one."""
            nonlocal exhausted
            while self._place - self._written < WINDOW:
                row = next(rows, None)
                if row is None:
                    exhausted = True
                    return
                place = self._place
                self._place += 1
                try:
                    request = self._request(row, llm.tokenizer)
                    begun = StartedRow(place, row, request, chat_of(request, llm, self.images))
                except KvernError as error:
                    self._finished[place] = failure(row, error)
                    if len(self._finished) % FAILED_BEFORE_WRITING == 0:
                        self._write_in_order()
                    continue
                self._begun[str(place)] = begun
                yield str(place), begun.prompt, self._seeded(begun.params, place), begun.request.adapter

        while not exhausted:
            with contextlib.closing(llm.as_completed(inputs())) as outputs:  # rows of a job that is interrupted end
                for output in outputs:
                    self._finish(output)
                    self._write_in_order()
                    done = self.journal.record.done
                    report(done.rows, done.generated_tokens - before.generated_tokens)
            self._write_in_order()
            self._commit()

    def _request(self, row: Row, tokenizer: Tokenizer) -> BatchRequest:
        if row.error is not None:
            raise InvalidRequest(row.error)
        if self.reader.columns is None and is_openai_row(row.values):
            if not self._as_lines:
                raise InvalidRequest(
                    "a row in OpenAI's batch format is answered in JSONL: let the output end in .jsonl"
                )
            model = str(self.identity.get("model"))
            adapters = self.identity.get("adapters", {})
            started = self.journal.record.started
            return read_openai_row(row.values, self.rules.params, model, started, tokenizer, adapters)
        return self.rules.read(row.values)

    def _seeded(self, params: SamplingParams, place: int) -> SamplingParams:
        if params.seed is not None:
            return params
        digest = hashlib.blake2b(f"{self.seed}/{place}".encode(), digest_size=8).digest()
        return params.replace(seed=int.from_bytes(digest) >> 1)

    def _finish(self, output: RequestOutput | FailedRequest) -> None:
        begun = self._begun.pop(output.request_id)
        error = getattr(output, "error", None)
        if error is not None:
            self._finished[begun.place] = failure(begun.row, error)
        else:
            self._finished[begun.place] = self._success(begun, output)  # type: ignore[arg-type]

    def _success(self, begun: StartedRow, output: RequestOutput) -> FinishedRow:
        self._cached_tokens += output.cached_tokens
        answer = begun.request.answer(output, begun.chat)
        if not self._as_lines:
            answer = {"row": begun.row.number, **answer}
        elif not is_openai_row(begun.row.values) or self.reader.columns is not None:
            answer = merged(begun.row.values, answer)
        generated = sum(len(completion.token_ids) for completion in output.outputs)
        return FinishedRow(encode(answer), False, len(output.prompt_token_ids), generated)

    def _write_in_order(self) -> None:
        """Adds the finished rows to the journal up to the first unfinished one."""
        with interrupts_deferred():
            while (finished := self._finished.pop(self._written, None)) is not None:
                self.journal.add(finished)
                self._written += 1
            self.journal.commit_when_due()

    def _commit(self) -> None:
        with interrupts_deferred():
            self.journal.commit()


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Delays Ctrl-C to the end of the block, so that files and counts agree. A second one ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = []

    def note(number: int, _: object) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if received:
        raise KeyboardInterrupt


def chat_of(request: BatchRequest, llm: LLM, images: ImageFolder | None) -> ChatRequest | None:
    chat = request.chat
    if chat is None:
        return None
    messages = chat.messages if images is None else images.read(chat.messages)
    return llm.chat_request(messages, request.params, chat.use, chat.options)


def failure(row: Row, error: KvernError) -> FinishedRow:
    """Returns the line for the errors file: row number, reason, and the row's own key if it has one."""
    fields: dict[str, Any] = {"row": row.number, "error": str(as_sent(error, sent_names(row.values)))}
    if "custom_id" in row.values:
        fields["custom_id"] = row.values["custom_id"]
    return FinishedRow(encode(fields), failed=True)


def encode(value: Any) -> bytes:
    return json_line(value, enc_hook=str)
