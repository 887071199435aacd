"""`kvern bench kernels` and `kvern bench gate` on a GPU. Run with `pytest -m gpu`."""

import itertools
from functools import partial

import msgspec
import pytest
import torch

from kvern.bench.compare import Side
from kvern.bench.gate import LOSS, code_of, judge_all
from kvern.bench.record import Case, Record, figure, make_record
from kvern.cli.main import main
from kvern.device.timing import time_calls
from kvern.kernels.norm import rms_norm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
ROWS, WIDTH = 200_000, 2048
ROUNDS = 5


def test_kernels_of_a_small_model_are_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["bench", "kernels", "--model", "kvern-1m", "--codes", "int4"]) == 0
    shown = capsys.readouterr().out
    for name in ("int4, ", "attention", "sampling, filtered", "_decode_attention_kernel", "TFLOP/s"):
        assert name in shown


@pytest.mark.alone
def test_five_percent_more_time_of_a_kernel_is_caught_in_ten_of_ten_gates_and_ten_clean_ones_raise_nothing() -> None:
    x = torch.randn(ROWS + ROWS // 20, WIDTH, dtype=torch.bfloat16, device="cuda")
    weight = torch.ones(WIDTH, dtype=torch.bfloat16, device="cuda")
    base, moments = make_record("kernels", None, []), itertools.count()

    def record(rows: int) -> Record:
        seconds = time_calls([partial(rms_norm, x[:rows], weight, 1e-6)])
        minute, second = divmod(next(moments), 60)
        when = f"2026-01-01T00:{minute:02}:{second:02}.000000+00:00"
        case = Case("norm", {"seconds": figure([seconds], "s", main=True)}, {})
        return msgspec.structs.replace(base, cases=[case], when=when)

    def gate(planted: int) -> int:
        rounds = [(record(ROWS), record(ROWS + planted)) for _ in range(ROUNDS)]
        before, after = (Side(name, list(side)) for name, side in zip("AB", zip(*rounds, strict=True), strict=True))
        return code_of(judge_all(before, after, 0.03))

    assert [gate(ROWS // 20) for _ in range(10)] == [LOSS] * 10
    assert LOSS not in [gate(0) for _ in range(10)]
