"""Weights in fewer bits, where the plan says why; by the job of `kvern quantize mixed`, which keeps to a loss."""

import gc
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from kvern.config import EngineConfig
from kvern.deploy.discover import Discovered
from kvern.deploy.journal import key_of, write_whole
from kvern.deploy.plan import Planned, context_of, estimated, load_of
from kvern.deploy.plan import reason as why_smaller
from kvern.deploy.shard import Sharded
from kvern.deploy.stage import Asked, Part, Work
from kvern.errors import ConfigError
from kvern.io.files import as_size, digest_of, open_regular, reason
from kvern.io.progress import work_progress
from kvern.models.folder import model_folder
from kvern.planning.estimate import Estimate
from kvern.quantize.calibration import Calibration, calibration
from kvern.quantize.checkpoint import Checkpoint
from kvern.quantize.job import make_method
from kvern.quantize.mixed import PAGE_NAME, AllPlain, Budget, Mixture, loss_of
from kvern.quantize.mixed_report import PLAIN, SECTION, MixedReport, read_report
from kvern.quantize.scheme import named
from kvern.quantize.sensitivity import SCHEMES
from kvern.runner.device import resolve_device
from kvern.text.tokenizer import Tokenizer

WEIGHTS = "weights"
"""The folder in a bundle."""
ROWS, TOKENS = 128, 512
"""Rows of the calibration's text at most, and tokens of each."""
HELD_OUT = 0.2
"""The share of the text that calibration does not see, and that verification takes."""


class Quantized(msgspec.Struct):
    """The weights to serve: `folder` with the bundle's own, or None for the model's as they are, and `why`.

    `loss`: nats a token on the calibration's text. `digest`: of the files of weights. `failed`: see `Stage`.
    """

    why: str
    folder: str | None = None
    bits: float = 0.0
    shares: dict[str, float] = {}
    loss: float = 0.0
    bytes_before: int = 0
    bytes_after: int = 0
    digest: str = ""
    failed: list[str] = []


def texts_of(work: Work, folder: Path) -> tuple[Calibration, Tensor]:
    """Returns the text for calibration, and rows that it does not see. Raises ConfigError."""
    tokenizer = Tokenizer(model_folder(EngineConfig(str(folder))))
    found = calibration(tokenizer, work.asked.calibration, ROWS, min(TOKENS, context_of(work)[1]))
    held = max(1, int(HELD_OUT * len(found.rows)))
    if len(found.rows) == 1:
        half = found.rows.shape[1] // 2
        return found._replace(rows=found.rows[:, :half]), found.rows[:, half:]
    return found._replace(rows=found.rows[:-held]), found.rows[-held:]


def check_files(asked: Asked) -> None:
    """Raises ConfigError if files that were given cannot be read."""
    for name, path in (("calibration", asked.calibration), ("quantization report", asked.mixture)):
        try:
            if path is not None:
                _digest([path])
        except (OSError, ValueError) as error:
            raise ConfigError(f"{name} {path} cannot be read: {reason(error)}; give a file") from None


class Quantize:
    """The fourth stage."""

    name = "quantize"
    result = Quantized

    def inputs(self, work: Work) -> Mapping[str, Any]:
        """The loss that is allowed, the text, and a mixture that is made again."""
        asked = work.asked
        return {
            "max_loss": asked.max_loss,
            "calibration": _digest([asked.calibration]) if asked.calibration else None,
            "mixture": _digest([asked.mixture]) if asked.mixture else None,
        }

    def run(self, work: Work) -> Quantized:
        """Measures, chooses and writes the folder, or says why not. Raises KvernError."""
        found, plan = work.of(Discovered), work.of(Planned)
        if found.quantized is not None:
            return Quantized(f"weights are quantized already ({found.quantized}): never twice")
        asked = work.asked
        if asked.mixture is None and (not plan.smaller or asked.expected is not None):
            if asked.expected not in (None, found.identity):
                told = f"{found.identity}, and the bundle's were {asked.expected}"
                return Quantized("as they are", failed=[f"the model's files are others: their digest is {told}"])
            return Quantized("neither memory nor the target asks for fewer bits")
        folder = Path(work.of(Sharded).folder)
        checkpoint = Checkpoint(folder, resolve_device(EngineConfig()))
        rows, _ = texts_of(work, folder)
        out = work.folder / WEIGHTS
        report = self._best(work, checkpoint, rows)
        result = Quantized(
            plan.smaller or "as in the bundle that is made again",
            WEIGHTS,
            report.bits,
            _shares(report),
            loss_of(report),
            sum(tensor.nbytes for tensor in checkpoint.stored),
            sum(path.stat().st_size for path in out.glob("*.safetensors")),
            _digest(sorted(out.glob("*.safetensors"))),
        )
        del checkpoint
        release()
        result.failed = _failed(work, result)
        return result

    def _best(self, work: Work, checkpoint: Checkpoint, rows: Calibration) -> MixedReport:
        """Writes the best mixture of the plan's formats; of all, if those lose too much or leave so much plain that it
        is not enough."""
        formats = [] if work.asked.mixture is not None else work.of(Planned).formats
        try:
            report = self._mix(work, checkpoint, rows, formats)
        except AllPlain:
            if not formats:
                raise
            lacks = "no layer can be within --max-loss"
        else:
            lacks = _lacks(work, report) if formats else ""
            if not lacks:
                return report
        work.say(f"    all precisions are measured, as {formats[0]} and plain weights are not enough: {lacks}")
        return self._mix(work, checkpoint, rows, [])

    def _mix(self, work: Work, checkpoint: Checkpoint, rows: Calibration, formats: Sequence[str]) -> MixedReport:
        """Measures what each precision costs, unless an earlier run has, and writes the best mixture."""
        out = work.folder / WEIGHTS
        shutil.rmtree(out, ignore_errors=True)
        release()  # what is free limits the measurement
        loss = work.asked.max_loss
        budget = None if work.asked.mixture is not None or loss is None else Budget(loss=loss)
        allowed = [scheme for scheme in SCHEMES if not formats or scheme.name in formats]
        key = key_of(rows.rows.tolist(), [scheme.name for scheme in allowed])
        kept = work.asked.mixture or work.journal.beside(f"mixture-{key}.json")
        told = read_report(kept) if kept.exists() else None
        if told is not None:
            names = {name for unit in told.units for name in unit.choices}
            allowed = [scheme for name in sorted(names) if (scheme := named(name)) is not None]
        # GPTQ goes column by column, minutes for an 8B model; with 8 bits it gains next to nothing
        has_4_bits = any(scheme.bits < 8 for scheme in allowed)
        settings: dict[str, Any] = {"ignore": []} | ({"act_order": True} if has_4_bits else {})
        method = make_method("gptq" if has_4_bits else "nearest")
        mixture = Mixture(checkpoint, rows, method, settings, allowed, work.asked.memory)
        if told is None:
            with work_progress("measuring", "layers", "layers", len(checkpoint.spec.layers)) as progress:
                told = mixture.measure(lambda done, layers: progress(done, done))
            write_whole(kept, msgspec.json.encode({SECTION: told.as_json()}))
        with work_progress("quantizing", "matrices", "million weights", len(checkpoint.matrices)) as progress:
            report = lambda matrices, weights: progress(matrices, weights / 1e6)  # noqa: E731
            return mixture.make(told, budget, out, progress=report)[1]

    def stands(self, work: Work, result: Quantized) -> bool:
        """True if the folder has the weights that were written."""
        if result.folder is None:
            return True
        files = sorted((work.folder / result.folder).glob("*.safetensors"))
        return bool(files) and _digest(files) == result.digest

    def report(self, result: Quantized) -> Part:
        """Bits, loss and size."""
        if result.folder is None:
            return Part([("weights", result.why)])
        parts = ", ".join(f"{name} {share:.0%}" for name, share in result.shares.items())
        rows = [
            ("why", result.why),
            ("bits a weight", f"{result.bits:.3f}: {parts}"),
            ("loss on the calibration's text", f"{result.loss:.4g} nats a token"),
            ("size", f"{as_size(result.bytes_before)}, now {as_size(result.bytes_after)}"),
        ]
        return Part(rows, f'<p><a href="{WEIGHTS}/{PAGE_NAME}">Why each layer has its precision</a></p>')


def release() -> None:
    """Gives the memory of a GPU back that nothing uses any more, for the engine that comes next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _estimate(work: Work) -> Estimate:
    """Returns the estimate of the weights that were written."""
    release()  # what is free of a GPU is in the estimate
    folder = work.folder / WEIGHTS
    return estimated(EngineConfig(str(folder)), folder, load_of(work), work.asked.memory)[0][0]


def _lacks(work: Work, report: MixedReport) -> str:
    """Returns why the weights that were written are not enough, or ""."""
    if work.asked.max_loss is not None and not (budget := Budget(loss=work.asked.max_loss)).kept_by(report):
        return f"they lose {loss_of(report):.4g} nats a token, and {budget.nats:.4g} are allowed"
    return why_smaller(_estimate(work), work.asked.target) if PLAIN in _shares(report) else ""


def _shares(report: MixedReport) -> dict[str, float]:
    shares = dict.fromkeys((unit.chosen for unit in report.units), 0.0)
    for unit in report.units:
        shares[unit.chosen] += unit.parameters / report.parameters
    return shares


def _failed(work: Work, result: Quantized) -> list[str]:
    """Returns which limits the new weights miss: the loss, or the memory that they were made for."""
    failed = []
    loss = work.asked.max_loss
    if work.asked.expected not in (None, result.digest):
        failed.append(f"weights have the digest {result.digest}, and those of the bundle {work.asked.expected}")
    if loss is not None and result.loss > Budget(loss=loss).nats:
        failed.append(
            f"weights lose {result.loss:.4g} nats a token on the calibration's text: {Budget(loss=loss).nats:.4g} are "
            "allowed (--max-loss)"
        )
    if work.of(Planned).lacks:
        best = _estimate(work)
        if best.lacks:
            failed.append(f"with {result.bits:.3f} bits a weight {best.lacks}: allow a larger --max-loss")
    return failed


def _digest(paths: list[Path]) -> str:
    """Returns a digest of the content of files. Raises OSError or ValueError."""
    streams = [open_regular(path) for path in paths]
    try:
        return digest_of(*streams).hex()
    finally:
        for stream in streams:
            stream.close()
