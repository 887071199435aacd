"""``kvern quantize --method mixed``: options and results of a mixture of precisions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvern.errors import ConfigError, shown

if TYPE_CHECKING:
    from kvern.quantize.calibration import Calibration
    from kvern.quantize.checkpoint import Checkpoint
    from kvern.quantize.job import Result
    from kvern.quantize.mixed import Budget
    from kvern.quantize.mixed_report import MixedReport


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
        sys.stderr.write(
            f"kvern: measuring each precision of each layer over {tokens:,} tokens: about "
            f"{operations(checkpoint, tokens) / 1e12:,.1f} TFLOP\n"
        )
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
    from rich.console import Console

    from kvern.quantize.mixed import MOST_TRIES, PAGE_NAME, loss_of

    console = Console()
    shares = {unit.chosen: 0 for unit in report.units}
    for unit in report.units:
        shares[unit.chosen] += unit.parameters
    parts = ", ".join(f"{name} {count / report.parameters:.0%}" for name, count in shares.items())
    measured = report.measured
    change = measured["perplexity"] / measured["plain_perplexity"] - 1
    console.print(
        f"{report.bits:.3f} bits per weight: {parts}\n"
        f"loss {measured['loss']:.4g} nats a token, perplexity {change:+.2%} on the calibration's text\n"
        f"why each layer has its precision: {out / PAGE_NAME}",
        highlight=False,
        soft_wrap=True,
    )
    if budget is not None and not budget.kept_by(report):
        sys.stderr.write(
            f"kvern: warning: the mixture loses {loss_of(report):.4g} nats a token, more than the {budget.nats:.4g} of "
            f"--max-loss, after {MOST_TRIES} tries: give a smaller --max-loss, or --target-bits\n"
        )
