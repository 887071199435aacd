"""``kvern train-eagle MODEL``: trains a draft head."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from kvern.cli.output import check_least, print_figures
from kvern.config import EngineConfig
from kvern.errors import ConfigError

if TYPE_CHECKING:
    from kvern.draft_training.job import Result

HELD_OUT = 0.05
"""The share of the text that the head is measured with and does not learn from."""


@dataclass(frozen=True)
class TrainEagleCommand:
    """Train a draft head of one layer for a model, and write it in the format of EAGLE-3.

    It learns best from text that the model itself wrote in answer to prompts like those that it will get (kvern run).
    Then: kvern serve MODEL --draft-model OUTPUT.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Folder, hub id or embedded model."""
    data: Path
    """Text, or JSONL of messages, prompts or texts."""
    output: Path
    """Folder for the head."""
    overwrite: bool = False
    """Replace OUTPUT, a model's folder, if it exists."""
    epochs: float = 3.0
    """Passes over the text."""
    length: int = 512
    """Tokens of a row of text, the longest context that is trained."""
    batch_rows: int = 8
    """Rows in one training step."""
    drafts: int = 4
    """Number of drafts in a row that the head learns to make."""
    draft_vocab_size: int = 32000
    """Number of tokens that it can draft: the most frequent ones of the text."""
    learning_rate: float | None = None
    """Highest learning rate. None: less for wider models, 0.001 at most."""
    seed: int = 0
    """Seed of the first weights and of the order of the rows."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device for the training; auto takes a GPU if there is one."""

    def execute(self) -> int:
        """Trains, prints the result and returns the exit code. Raises KvernError."""
        self._check()
        from kvern.draft_training.job import Settings, Training, check_model, drafted_tokens
        from kvern.io.progress import work_progress
        from kvern.models.hub import resolve_model
        from kvern.models.loader import LoadOptions, load_model
        from kvern.quantize.calibration import calibration
        from kvern.quantize.writer import check_target, writing
        from kvern.runner.device import resolve_device
        from kvern.runner.gpu_checks import check_dtype
        from kvern.text.tokenizer import Tokenizer

        folder = resolve_model(self.model).absolute()
        check_target(self.output, folder, self.overwrite, 0)
        device = resolve_device(EngineConfig(device=self.device))
        decoder = load_model(folder, LoadOptions(device=device, max_model_len=self.length))
        check_dtype(decoder.build.dtype, device)
        check_model(decoder.spec)
        rows = calibration(Tokenizer(folder), self.data, sys.maxsize, self.length).rows
        held_out = max(1, round(HELD_OUT * len(rows)))
        if len(rows) < (least := held_out + self.batch_rows):
            raise ConfigError(f"{self.data} has {len(rows)} rows of {self.length} tokens: it takes {least} at least")
        learnt = rows[:-held_out]
        steps = max(1, round(self.epochs * len(learnt) / self.batch_rows))
        settings = Settings(steps, self.batch_rows, self.drafts, self.seed, self.learning_rate)
        drafted = drafted_tokens(learnt, decoder.spec.vocab_size, self.draft_vocab_size)
        training = Training(decoder, learnt, drafted, settings)
        with work_progress("training", "steps", "tokens", steps) as report:
            result = training.train(
                rows[-held_out:], lambda done, tokens, loss: report(done, tokens, f", loss {loss:.3f}")
            )
        with writing(self.output, len(training.head.state_dict()) + 2) as writer:
            training.write(writer, decoder.build.dtype, folder)
        print_result(result, self.output)
        return 0

    def _check(self) -> None:
        check_least(self, "length", "batch_rows", "drafts", "draft_vocab_size")
        for name in ("epochs", "learning_rate"):
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value}: it must be above 0")


def print_result(result: Result, output: Path) -> None:
    """Prints the result on stdout."""
    rows = [("loss", f"{result.loss:.3f}")]
    for place, share in enumerate(result.acceptance, 1):
        rows.append((f"draft {place} right" + (", if all before are" if place > 1 else ""), f"{share:.1%}"))
    rows.append((f"tokens a step, {len(result.acceptance)} drafts", f"{result.tokens_of_step:.2f}"))
    rows.append(("seconds", f"{result.seconds:.1f}"))
    print_figures("kvern train-eagle", rows)
    sys.stdout.write(f"kvern serve MODEL --draft-model {output}\n")
