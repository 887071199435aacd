"""A model of several precisions: measured, chosen under a budget, written, and measured again as it was written."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvern.errors import ConfigError
from kvern.layers.states import new_states
from kvern.models.loader import LoadOptions, load_model
from kvern.quantize.blocks import LayersAttend, Walk
from kvern.quantize.calibration import Calibration
from kvern.quantize.checkpoint import Checkpoint
from kvern.quantize.job import Progress, Result, Settings, quantize
from kvern.quantize.method import Method, Plan
from kvern.quantize.mixed_report import PLAIN, SECTION, MixedReport
from kvern.quantize.report_page import page
from kvern.quantize.scheme import Scheme, named
from kvern.quantize.sensitivity import SCHEMES, exact_scores, least_bits, log_probabilities, measure, tokens_for
from kvern.quantize.statistics import REPORT_NAME
from kvern.quantize.writer import check_target, placing

PAGE_NAME = "quantization_report.html"
Measuring = Callable[[int, int], None]
"""A callback with the number of measured layers and of all layers."""
MOST_TRIES = 3
"""The number of attempts to keep a mixture within a loss."""


class AllPlain(ConfigError):
    """An allowed loss within which no layer can be quantized."""


@dataclass(frozen=True)
class Budget:
    """The budget of a mixture: bits per weight, scales included, or a `loss` of perplexity, 0.01 for 1 %."""

    bits: float | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        if (self.bits is None) == (self.loss is None):
            raise ConfigError("a mixture needs one of --target-bits, as 5.0, and --max-loss, as 1%")
        if self.bits is not None and not 0 < self.bits <= 64:
            raise ConfigError(f"target_bits is {self.bits:g}: it must be above 0, as 5.0")
        if self.loss is not None and not 0 < self.loss <= 1:
            raise ConfigError(f"max_loss is {self.loss:.4g}: it must be above 0 and at most 100%, as 1%")

    def choose(self, report: MixedReport, tightened: float) -> MixedReport:
        """The best mixture; `tightened` multiplies the limit of the sum of losses."""
        report = replace(report, budget=self.as_json())
        if self.bits is not None:
            return report.within_bits(self.bits)
        chosen = report.within_loss(tightened * self.nats)
        if all(unit.chosen == PLAIN for unit in chosen.units):
            raise AllPlain(f"max_loss is {self.loss:.4g}: no layer can be quantized within it, allow more")
        return chosen

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises ConfigError, before anything is measured, for bits that no mixture of this model has."""
        least, plain = least_bits(checkpoint), 8 * checkpoint.dtype.itemsize
        if self.bits is not None and self.bits < least:
            raise ConfigError(
                f"target_bits is {self.bits:g}: the smallest mixture has {least:.3f} bits a weight, ask for more"
            )
        if self.bits is not None and self.bits >= plain:
            raise ConfigError(f"target_bits is {self.bits:g}: the model has {plain} bits a weight, ask for fewer")

    def kept_by(self, report: MixedReport) -> bool:
        """True if the finished mixture is within the allowed loss."""
        return self.loss is None or loss_of(report) <= self.nats

    @property
    def nats(self) -> float:
        """The loss in nats a token: perplexity is their exponential."""
        return math.log1p(self.loss or 0.0)

    def as_json(self) -> dict[str, float]:
        return {"target_bits": self.bits} if self.bits is not None else {"max_loss": self.loss or 0.0}


class Mixture:
    """Makes one: of `checkpoint`, with `calibration`, by `method` for the codes.

    `settings` go into the report as they are. `allowed`: the precisions that are measured. `memory`: bytes of
    a GPU that measuring may use; None: what is free.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        calibration: Calibration,
        method: Method,
        settings: Mapping[str, Any] | None = None,
        allowed: Sequence[Scheme] = SCHEMES,
        memory: int | None = None,
    ) -> None:
        self.checkpoint, self.calibration = checkpoint, calibration
        self._method, self._settings = method, dict(settings or {})
        self._allowed, self._memory = allowed, memory
        self._walk: Walk | None = None
        self._measuring = 0.0  # seconds

    @cached_property
    def rows(self) -> Tensor:
        """The rows of the calibration with which losses are measured."""
        rows = self.calibration.rows
        return rows[: max(1, tokens_for(self.checkpoint, self._allowed, self._memory) // rows.shape[1])]

    def measure(self, progress: Measuring = lambda done, layers: None) -> MixedReport:
        """Measures the loss of each precision of each unit; all choices are plain so far."""
        started = time.monotonic()
        self._walk = Walk(self.checkpoint, self.rows)
        units = tuple(measure(self._walk, progress, self._allowed))
        self._measuring = time.monotonic() - started
        return MixedReport(
            model=self.checkpoint.folder.name,
            plain=str(self.checkpoint.dtype).removeprefix("torch."),
            units=units,
            calibration={
                "source": self.calibration.source,
                "tokens": self.rows.numel(),
                "row_tokens": self.rows.shape[1],
            },
        )

    def make(
        self,
        report: MixedReport,
        budget: Budget | None,
        out: Path,
        *,
        overwrite: bool = False,
        progress: Progress = lambda matrices, weights: None,
    ) -> tuple[Result, MixedReport]:
        """Writes the best mixture under a budget, or with the report's choices if it is None, to the folder `out`.

        A mixture with a limited loss is measured, and made again with a smaller sum of losses if it exceeds the limit;
        the last attempt is kept in any case. The time of the result is that of `measure` and of all attempts. Raises
        ConfigError or CorruptCheckpoint; after any exception nothing of `out` remains.
        """
        started = time.monotonic() - self._measuring
        tightened = 1.0
        check_target(out, self.checkpoint.folder, overwrite, 0)
        with placing(out) as made:
            for _ in range(MOST_TRIES):
                chosen = report if budget is None else budget.choose(report, tightened)
                result = self._write(chosen, made, progress)
                chosen = replace(chosen, measured=measure_folder(made, self._behind_layers(), self.rows))
                result = replace(result, seconds=time.monotonic() - started)
                tell(made, chosen, result.seconds)
                if budget is None or budget.kept_by(chosen):
                    break
                tightened *= 0.9 * budget.nats / loss_of(chosen)
        return result, chosen

    def _behind_layers(self) -> Walk:
        """The plain model's walk at its end."""
        if self._walk is None:
            self._walk = Walk(self.checkpoint, self.rows)
            for index in range(self._walk.layers):
                self._walk.advance(self._walk.block(index))
        return self._walk

    def _write(self, report: MixedReport, out: Path, progress: Progress) -> Result:
        about = {"method": "mixed", "settings": self._settings, SECTION: report.as_json()}
        settings = Settings(plan_of(report), self._method, about)
        return quantize(self.checkpoint, settings, self.calibration, out, overwrite=True, progress=progress)


def plan_of(report: MixedReport) -> Plan:
    """The plan of a report. Raises ConfigError for an unknown precision."""
    schemes = {unit.name: named(unit.chosen) for unit in report.units}
    return {layer: scheme for unit in report.units for layer in unit.layers if (scheme := schemes[unit.name])}


def loss_of(report: MixedReport) -> float:
    """The measured loss in nats a token: of the distribution, or of perplexity if that is larger."""
    grown = math.log(report.measured["perplexity"] / report.measured["plain_perplexity"])
    return max(report.measured["loss"], grown)


@torch.no_grad()
def measure_folder(folder: Path, walk: Walk, rows: Tensor) -> dict[str, float]:
    """The loss of a folder's model against the plain one, whose `walk` is after its last layer, on the same rows, and
    the share of tokens that both find the most probable."""
    device, length = walk.checkpoint.device, rows.shape[1]
    decoder, ends = load_model(folder, LoadOptions(device=device, max_model_len=length)), walk.ends()
    attend, positions = LayersAttend(decoder.spec, length), torch.arange(length, device=device)
    sums = torch.zeros(4, dtype=torch.float64)
    for ids, hidden in zip(rows.to(device), walk.hidden, strict=True):
        plain = log_probabilities(ends, hidden)
        states = new_states(decoder.spec.recurrent, [length], decoder.build.dtype, device)
        found = exact_scores(decoder, decoder(ids, positions, attend, states=states)).log_softmax(-1)
        divergence = (plain.exp() * (plain - found)).sum(-1)
        surprises = [-scores[:-1].gather(1, ids[1:, None]) for scores in (found, plain)]
        same = plain.argmax(-1) == found.argmax(-1)
        sums += torch.stack([part.double().mean().cpu() for part in (divergence, *surprises, same)])
    loss, *means, agreement = (sums / len(rows)).tolist()
    return {
        "loss": max(0.0, loss),
        "perplexity": math.exp(means[0]),
        "plain_perplexity": math.exp(means[1]),
        "agreement": agreement,
    }


def tell(folder: Path, report: MixedReport, seconds: float) -> None:
    """Adds the measurements and the time to the report in the folder, and writes the page."""
    path = folder / REPORT_NAME
    values = json.loads(path.read_text()) | {SECTION: report.as_json()}
    values["totals"]["seconds"] = round(seconds, 1)
    path.write_text(json.dumps(values, indent=1) + "\n")
    (folder / PAGE_NAME).write_text(page(report))
