"""``kvern quantize MODEL``: a smaller checkpoint of a model."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from kvern.cli.output import check_least, print_figures, print_lines, say
from kvern.config import EngineConfig
from kvern.errors import ConfigError, shown

if TYPE_CHECKING:
    from kvern.quantize.calibration import Calibration
    from kvern.quantize.checkpoint import Checkpoint
    from kvern.quantize.job import Result
    from kvern.quantize.method import Plan
    from kvern.quantize.mixed import Budget
    from kvern.quantize.mixed_report import MixedReport
    from kvern.quantize.scheme import Scheme


def budget_of(target_bits: float | None, max_loss: str | None, report: Path | None) -> Budget | None:
    """Returns the limits of a mixture; None if a report fixes it. Raises ConfigError."""
    from kvern.quantize.mixed import Budget

    if report is not None:
        if target_bits is not None or max_loss is not None:
            raise ConfigError("report says what the mixture is made of: leave target_bits and max_loss out")
        return None
    return Budget(target_bits, None if max_loss is None else share_of(max_loss))


def share_of(text: str) -> float:
    """Reads a share: 0.01 from "1%" or "0.01". Raises ConfigError."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ConfigError(f"max_loss is {shown(text)}: it must be a share of perplexity, as 1% or 0.01") from None


def make_mixture(
    checkpoint: Checkpoint,
    calibration: Calibration,
    budget: Budget | None,
    report: Path | None,
    out: Path,
    *,
    overwrite: bool,
    settings: dict[str, Any],
) -> tuple[Result, MixedReport]:
    """Measures, chooses and writes, with progress on stderr. Raises KvernError."""
    from kvern.io.progress import work_progress
    from kvern.quantize.job import make_method
    from kvern.quantize.mixed import Mixture
    from kvern.quantize.mixed_report import read_report
    from kvern.quantize.sensitivity import operations
    from kvern.quantize.writer import check_target

    told = read_report(report) if report is not None else None
    if budget is not None:
        budget.check(checkpoint)
    plain = sum(tensor.nbytes for tensor in checkpoint.stored)
    check_target(out, checkpoint.folder, overwrite, int(plain * (budget.bits / 16 if budget and budget.bits else 0.5)))
    mixture = Mixture(checkpoint, calibration, make_method("gptq", act_order=settings["act_order"]), settings)
    if told is None:
        tokens = mixture.rows.numel()
        work = operations(checkpoint, tokens) / 1e12
        say(f"measuring each precision of each layer over {tokens:,} tokens: about {work:,.1f} TFLOP")
        with work_progress("measuring", "layers", "layers", len(checkpoint.spec.layers)) as progress:
            told = mixture.measure(lambda done, layers: progress(done, done))
    with work_progress("quantizing", "matrices", "million weights", len(checkpoint.matrices)) as progress:
        return mixture.make(
            told,
            budget,
            out,
            overwrite=overwrite,
            progress=lambda matrices, weights: progress(matrices, weights / 1e6),
        )


def print_mixture(report: MixedReport, budget: Budget | None, out: Path) -> None:
    """Prints the precisions and the loss of a mixture, and a warning if the loss is more than was allowed."""
    from kvern.quantize.mixed import MOST_TRIES, PAGE_NAME, loss_of

    shares = {unit.chosen: 0 for unit in report.units}
    for unit in report.units:
        shares[unit.chosen] += unit.parameters
    parts = ", ".join(f"{name} {count / report.parameters:.0%}" for name, count in shares.items())
    measured = report.measured
    change = measured["perplexity"] / measured["plain_perplexity"] - 1
    print_lines(
        f"{report.bits:.3f} bits per weight: {parts}",
        f"loss {measured['loss']:.4g} nats a token, perplexity {change:+.2%} on the calibration's text",
        f"why each layer has its precision: {out / PAGE_NAME}",
    )
    if budget is not None and not budget.kept_by(report):
        say(
            f"warning: the mixture loses {loss_of(report):.4g} nats a token, more than the {budget.nats:.4g} of "
            f"--max-loss, after {MOST_TRIES} tries: give a smaller --max-loss, or --target-bits"
        )


Name = Literal["fp8", "int8", "int4", "awq", "gptq", "mixed"]
FOUR_BITS = ("int4", "awq", "gptq")
CALIBRATED = ("awq", "gptq", "mixed")
USUAL_GROUP = 128
FEW_ROWS, MANY_ROWS = 16, 128
"""The usual rows of the calibration: to measure errors, and to choose codes."""


@dataclass(frozen=True)
class QuantizeCommand:
    """Write a model with fewer bits per weight, as a folder that kvern, transformers and vLLM load.

    The model is read layer by layer: memory is needed for one layer and the calibration's hidden states. Embeddings,
    output layers, norms and routers stay as they are. quantization_report.json in the folder has the errors of each
    matrix.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Folder, hub id or embedded model with float32, float16 or bfloat16 weights."""
    method: Name = "gptq"
    """fp8 and int8: 8 bits for weights and activations, with the least loss. int4: 4 bits for weights, rounded to the
    nearest; awq and gptq: the same with calibration, slower to make and closer to the model. mixed: 4, 8 or 16 bits for
    each layer, the best choice within target_bits or max_loss."""
    target_bits: float | None = None
    """Bits per weight of mixed, scales included, such as 5.0."""
    max_loss: str | None = None
    """Growth of the perplexity that mixed may cause, such as 1%."""
    report: Path | None = None
    """File quantization_report.json, edited if you like, whose choices mixed takes without measuring again."""
    out: Path | None = None
    """Folder for the new checkpoint. None: MODEL-METHOD in the current folder."""
    overwrite: bool = False
    """Replace OUT, a model's folder, if it exists."""
    group_size: int | None = None
    """Number of weights that share a scale in 4-bit methods: 32, 64 or 128. None: 128."""
    zero_points: bool = False
    """Give each group of 4-bit codes a zero point as well."""
    blocks: bool = False
    """Use one scale for 128 x 128 weights in fp8, instead of one for each output."""
    act_order: bool = True
    """Round the columns of the largest inputs first in gptq."""
    ignore: tuple[str, ...] = ()
    """Regular expressions of matrices that stay as they are, such as layers.0. or down_proj."""
    calibration: Path | None = None
    """Text, or JSONL of messages, prompts or texts, like those that the model will read. None: kvern's own
    conversations."""
    calibration_rows: int | None = None
    """Rows of text that the model reads, if there are so many. None: 128 for awq, gptq and mixed, else 16, which only
    measure."""
    calibration_tokens: int = 512
    """Tokens of each row."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device for the computation; auto takes a GPU if there is one."""

    def execute(self) -> int:
        """Quantizes, prints the table and returns the exit code. Raises KvernError."""
        budget = budget_of(self.target_bits, self.max_loss, self.report) if self.method == "mixed" else None
        scheme = self._scheme()
        self._check()
        from kvern.io.progress import work_progress
        from kvern.models.hub import resolve_model
        from kvern.quantize import job
        from kvern.quantize.checkpoint import Checkpoint
        from kvern.runner.device import resolve_device
        from kvern.runner.gpu_checks import check_dtype

        device = resolve_device(EngineConfig(device=self.device))
        checkpoint = Checkpoint(resolve_model(self.model).absolute(), device)
        check_dtype(checkpoint.dtype, device)
        out = self.out or Path(f"{checkpoint.folder.name}-{self.method}")
        if scheme is None:
            return self._mix(checkpoint, budget, out)
        plan = self._plan(checkpoint, scheme)
        settings = job.Settings(
            plan,
            job.make_method(self.method, act_order=self.act_order),
            {"method": self.method, "settings": self._told(scheme)},
        )
        job.check(checkpoint, settings, out, overwrite=self.overwrite)
        calibration = self._calibration(checkpoint)
        with work_progress("quantizing", "matrices", "million weights", len(plan)) as report:
            result = job.quantize(
                checkpoint,
                settings,
                calibration,
                out,
                overwrite=self.overwrite,
                progress=lambda matrices, weights: report(matrices, weights / 1e6),
            )
        print_table(self.method, result, calibration)
        print_next(out)
        return 0

    def _mix(self, checkpoint: Checkpoint, budget: Budget | None, out: Path) -> int:
        for name in [name for name in checkpoint.matrices if self._ignores(name)]:
            del checkpoint.matrices[name]
        calibration = self._calibration(checkpoint)
        result, report = make_mixture(
            checkpoint,
            calibration,
            budget,
            self.report,
            out,
            overwrite=self.overwrite,
            settings={"act_order": self.act_order, "ignore": list(self.ignore)},
        )
        print_table(self.method, result, calibration)
        print_mixture(report, budget, out)
        print_next(out)
        return 0

    def _ignores(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.ignore)

    def _scheme(self) -> Scheme | None:
        """Returns the scheme of all matrices; None if they differ."""
        from kvern.quantize.scheme import FP8, FP8_BLOCK, GROUPS, INT8, int4

        if self.method not in FOUR_BITS and (self.group_size is not None or self.zero_points):
            raise ConfigError(f"group_size and zero_points are for {', '.join(FOUR_BITS)}; method is {self.method}")
        if self.method != "mixed" and (self.target_bits, self.max_loss, self.report) != (None, None, None):
            raise ConfigError(f"target_bits, max_loss and report are for mixed; method is {self.method}")
        if self.blocks and self.method != "fp8":
            raise ConfigError(f"blocks is for fp8; method is {self.method}")
        if self.group_size is not None and self.group_size not in GROUPS:
            raise ConfigError(f"group_size is {self.group_size}: it must be one of {', '.join(map(str, GROUPS))}")
        if self.method in FOUR_BITS:
            return int4(self.group_size or USUAL_GROUP, symmetric=not self.zero_points)
        if self.method == "mixed":
            return None
        return INT8 if self.method == "int8" else FP8_BLOCK if self.blocks else FP8

    def _check(self) -> None:
        check_least(self, "calibration_rows", "calibration_tokens")
        for pattern in self.ignore:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"ignore is {shown(pattern)}: that is no regular expression: {error}") from None

    def _plan(self, checkpoint: Checkpoint, scheme: Scheme) -> Plan:
        from kvern.quantize.job import check_plan

        names = checkpoint.matrices
        plan = {name: scheme for name in names if not self._ignores(name)}
        check_plan(checkpoint, plan)
        return plan

    def _calibration(self, checkpoint: Checkpoint) -> Calibration:
        from kvern.quantize.calibration import calibration
        from kvern.text.tokenizer import Tokenizer

        rows = self.calibration_rows or (MANY_ROWS if self.method in CALIBRATED else FEW_ROWS)
        length = min(self.calibration_tokens, checkpoint.spec.max_position_embeddings)
        found = calibration(Tokenizer(checkpoint.folder), self.calibration, rows, length)
        count, tokens = found.rows.shape
        if self.calibration_rows is not None and count < rows:
            made = f"{count} rows of {tokens} tokens, not {rows}"
            say(f"the calibration's text makes {made}: give more text with --calibration")
        return found

    def _told(self, scheme: Scheme) -> dict[str, Any]:
        """Returns the settings for the report."""
        return {
            "scheme": scheme.name,
            "act_order": self.method == "gptq" and self.act_order,
            "ignore": list(self.ignore),
        }


def print_table(method: str, result: Result, calibration: Calibration) -> None:
    """Prints the result on stdout."""
    errors = {item.name: item.output_error for item in result.matrices if item.output_error is not None}
    rows, length = calibration.rows.shape
    figures = [
        ("precision", ", ".join(dict.fromkeys(item.scheme for item in result.matrices))),
        ("layers", f"{len({item.layer for item in result.matrices}):,}"),
        ("matrices", f"{len(result.matrices):,}"),
        ("bits per weight", f"{result.bits_per_weight:.3f}"),
        ("calibration", f"{rows} x {length} tokens"),
    ]
    if errors:
        worst = max(errors, key=errors.__getitem__)
        figures.append(("error of outputs", f"{sum(errors.values()) / len(errors):.2%} on average"))
        figures.append(("", f"{errors[worst]:.2%} at most: {worst}"))
    figures.append(("size before", f"{result.bytes_before / 1e6:,.1f} MB"))
    figures.append(("size after", f"{result.bytes_after / 1e6:,.1f} MB"))
    figures.append(("seconds", f"{result.seconds:.1f}"))
    print_figures(f"kvern quantize: {method}", figures)


def print_next(out: Path) -> None:
    """Prints the next commands for the user."""
    for command, what in (("chat", "talk to it"), ("serve", "serve it"), ("models", "what it takes in memory")):
        sys.stdout.write(f"{f'kvern {command} {out}':{len(str(out)) + 16}}{what}\n")
