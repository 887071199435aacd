"""The formats of weights that a GPU gets: FP8 alone where the plan says that it is enough."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvern.config import EngineConfig
from kvern.deploy import pipeline, plan
from kvern.deploy.quantize import Quantized
from kvern.deploy.stage import Asked, Work
from kvern.planning.estimate import MARGIN_BYTES, seconds_of
from kvern.quantize import mixed, sensitivity
from kvern.quantize.mixed_report import read_report
from kvern.quantize.statistics import REPORT_NAME
from tests.support.killed_deployments import CARD
from tests.support.tiny_model import make_tiny_model

GPU = replace(CARD, memory=8e10, rate=1e11, rate_8bit=2e11, overhead=0.0, host=False)


def asked(folder: Path) -> Asked:
    text = folder / "words.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 60)
    model, load = make_tiny_model(folder / "tiny"), "rate=inf,requests=3,input=32,output=8"
    return Asked(str(model), folder / "out", workload=load, calibration=text)


def quantized(given: Asked, said: list[str] | None = None) -> Work:
    return pipeline.deploy(given, False, [].append if said is None else said.append, pipeline.stages()[:4]).work


def told(folder: Path) -> tuple[set[str], dict[str, Any]]:
    """The precisions that were measured, and the settings of the report."""
    path = folder / "out" / "weights" / REPORT_NAME
    names = {name for unit in read_report(path).units for name in unit.choices}
    return names, json.loads(path.read_text())["settings"]


@pytest.mark.parametrize(
    ("limit", "has_8_bits", "is_enough"), [(0.15, True, True), (0.1, True, False), (0.15, False, False)]
)
def test_weights_for_a_gpu_are_fp8_if_that_is_enough_for_the_target(
    limit: float, has_8_bits: bool, is_enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of the plain model are estimated at 0.21 ms, those in 8 bits at 0.11 ms."""
    gpu = replace(GPU, rate_8bit=2e11 if has_8_bits else 1e11)
    monkeypatch.setattr(plan, "this_machine", lambda config, dtype: [gpu])
    work = quantized(replace(asked(tmp_path), max_loss=0.05, target={"itl": limit / 1000}))
    planned = work.of(plan.Planned)
    assert planned.formats == (["fp8"] if is_enough else []) and planned.decode < 0.00015
    load = plan.load_of(work)
    estimates, plain, _ = plan.estimated(EngineConfig(work.asked.model), Path(work.asked.model), load, None, [gpu])
    assert planned.seconds < 0.75 * seconds_of(plain, gpu, estimates[0].split, load.lengths, planned.batch)
    offered, settings = told(tmp_path)
    chosen = set(work.of(Quantized).shares)
    if is_enough:
        assert offered == {"plain", "fp8"} and chosen == {"fp8"}
        assert settings == {"ignore": []}  # no option of GPTQ, which did not round them
    else:
        assert offered > {"plain", "fp8", "int8", "int4-g32"} and any("int" in name for name in chosen)
        assert settings == {"ignore": [], "act_order": True}


@pytest.mark.parametrize(
    ("max_loss", "given"),
    [
        (0.007, {"target": {"itl": 0.00015}}),  # FP8 for a tenth of the weights
        (0.002, {"target": {"itl": 0.00015}}),  # for none
        (0.007, {"memory": int(MARGIN_BYTES) + 220_000}),
    ],
)
def test_all_precisions_are_measured_if_the_loss_leaves_too_much_plain_beside_fp8(
    max_loss: float, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mixtures with INT8 are as fast, and as small, as the plan expects of FP8."""
    monkeypatch.setattr(plan, "this_machine", lambda config, dtype: [GPU])
    said: list[str] = []
    work = quantized(replace(asked(tmp_path), max_loss=max_loss, **given), said)
    made = work.of(Quantized)
    assert work.of(plan.Planned).formats == ["fp8"] and made.shares["int8"] > 0.8 and not made.failed
    folder = tmp_path / "out" / "weights"
    best = plan.estimated(EngineConfig(str(folder)), folder, plan.load_of(work), work.asked.memory)[0][0]
    assert not plan.reason(best, work.asked.target)
    assert sum("all precisions are measured, as fp8 and plain weights are not enough" in line for line in said) == 1


def test_all_precisions_are_measured_if_fp8_loses_more_than_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses of single layers promised less, and no attempt is left."""
    monkeypatch.setattr(plan, "this_machine", lambda config, dtype: [GPU])
    monkeypatch.setattr(mixed, "MOST_TRIES", 1)
    said: list[str] = []
    made = quantized(replace(asked(tmp_path), max_loss=0.02, target={"itl": 0.00015}), said).of(Quantized)
    assert "int8" in made.shares and made.loss < 0.0198 and not made.failed
    assert any("not enough: they lose 0.0" in line and "and 0.0198 are allowed" in line for line in said)


def test_fp8_beside_plain_weights_stays_if_it_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "this_machine", lambda config, dtype: [GPU])
    given = replace(asked(tmp_path), max_loss=0.02, target={"itl": 0.00015}, memory=8 << 30)
    seen = list[int | None]()
    tokens = sensitivity.tokens_for
    monkeypatch.setattr(mixed, "tokens_for", lambda *of: (seen.append(of[2]), tokens(*of))[1])
    assert set(quantized(given).of(Quantized).shares) == {"fp8", "plain"}
    assert seen == [8 << 30]
