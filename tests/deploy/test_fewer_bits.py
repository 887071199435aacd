"""The formats of weights that a GPU gets: FP8 alone where the plan says that it is enough."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvern.config import EngineConfig
from kvern.deploy import pipeline, plan
from kvern.deploy.quantize import Quantized
from kvern.deploy.stage import Asked
from kvern.planning.estimate import seconds_of
from kvern.quantize.mixed_report import read_report
from kvern.quantize.statistics import REPORT_NAME
from tests.support.killed_deployments import CARD
from tests.support.tiny_model import make_tiny_model


@pytest.mark.parametrize(
    ("limit", "has_8_bits", "is_enough"), [(0.15, True, True), (0.1, True, False), (0.15, False, False)]
)
def test_weights_for_a_gpu_are_fp8_if_that_is_enough_for_the_target(
    limit: float, has_8_bits: bool, is_enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of the plain model are estimated at 0.21 ms, those in 8 bits at 0.11 ms."""
    model = make_tiny_model(tmp_path / "tiny")
    text = tmp_path / "words.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 60)
    rate = 2e11 if has_8_bits else 1e11
    gpu = replace(CARD, memory=8e10, rate=1e11, rate_8bit=rate, overhead=0.0, host=False)
    monkeypatch.setattr(plan, "this_machine", lambda config, dtype: [gpu])
    asked = Asked(
        str(model),
        tmp_path / "out",
        max_loss=0.05,
        target={"itl": limit / 1000},
        workload="rate=inf,requests=3,input=32,output=8",
        calibration=text,
    )
    work = pipeline.deploy(asked, False, lambda line: None, pipeline.stages()[:4]).work
    planned = work.of(plan.Planned)
    assert planned.formats == (["fp8"] if is_enough else []) and planned.decode < 0.00015
    load = plan.load_of(work)
    estimates, plain, _ = plan.estimated(EngineConfig(str(model)), model, load, None, [gpu])
    assert planned.seconds < 0.75 * seconds_of(plain, gpu, estimates[0].split, load.lengths, planned.batch)
    report = read_report(tmp_path / "out" / "weights" / REPORT_NAME)
    offered = {name for unit in report.units for name in unit.choices}
    chosen = set(work.of(Quantized).shares)
    if is_enough:
        assert offered == {"plain", "fp8"} and chosen == {"fp8"}
    else:
        assert offered > {"plain", "fp8", "int8", "int4-g32"} and any("int" in name for name in chosen)
