"""Steps of many rows in two halves, whose sums over ranks are in flight meanwhile: as one process answers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvern.worker.worker
from kvern.device.ranks import ALONE, Ranks
from kvern.device.stages import Stage
from kvern.kernel_list import KERNELS
from kvern.kernels.norm import rms_norm
from kvern.kernels.quantize_rows import Coding, RowCodes
from kvern.layers import halves
from kvern.layers.attention import StepAdapters
from kvern.layers.build import Build
from kvern.layers.fused import SummingRMSNorm
from kvern.layers.halves import least_rows
from kvern.model_spec import NormSpec
from kvern.models.decoder import Decoder, LayerInputs
from tests.families import make_checkpoint
from tests.kernels.test_late_sums import STEPS, Turns, sampled, together
from tests.kernels.test_own_rows_graphs import CPU

pytestmark = [
    pytest.mark.usefixtures("few_products"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted in turns"),
]
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
LAYER = [("begun", 3), ("begun", 2), ("there", 3), ("begun", 3), ("there", 2), ("begun", 2)]
"""Of five rows, from the products behind attention on: a half's sum is waited for when the other's is begun."""
NEXT = [("there", 3), ("there", 2)]
"""Before the products of the next layer, or of whoever knows no halves."""


@pytest.fixture(autouse=True)
def small_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels, and halves of three rows and more."""
    groups = frozenset(kernel.group for kernel in KERNELS if not kernel.group.startswith("hopper"))
    monkeypatch.setattr(kvern.worker.worker, "usable_kernels", lambda *_: (groups, groups))
    for name, value in {"HALVED_ROWS": 3, "HALVED_WORK": 1, "TILE_ROWS": 1}.items():
        monkeypatch.setattr(halves, name, value)


@pytest.mark.parametrize("maps", [True, False])
def test_sums_of_a_half_are_in_flight_beside_products_of_the_other(maps: bool, tmp_path: Path) -> None:
    folder = make_checkpoint("llama_bias", tmp_path, num_hidden_layers=3)
    expected = sampled(folder, ALONE)
    whole = [("begun", 5), ("there", 5)], [("begun", 1), ("there", 1)]  # of embeddings, and of what is sampled from
    for answers, ranks in together(tmp_path, lambda ranks: sampled(folder, ranks, **TWO), maps=maps):
        assert answers == expected
        prompt = [*whole[0], *LAYER, *NEXT, *LAYER, *NEXT, *whole[1], *whole[1]]
        assert ranks.sums[: len(prompt)] == prompt, "the last layer joins the halves and computes one row"


def test_layers_with_experts_join_the_halves_of_those_without(tmp_path: Path) -> None:
    folder = make_checkpoint("glm4_moe", tmp_path)
    expected = sampled(folder, ALONE)
    for answers, ranks in together(tmp_path, lambda ranks: sampled(folder, ranks, **TWO)):
        assert answers == expected
        assert ranks.sums[2 : 2 + len(LAYER) + len(NEXT)] == [*LAYER, *NEXT]
        assert ranks.sums.count(("begun", 3)) == 2, "a layer of a prompt of five tokens"


def test_draft_heads_read_what_layers_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, computed = make_checkpoint("llama_bias", tmp_path, num_hidden_layers=3), Decoder.forward
    found: dict[Ranks, Tensor] = {}

    def tapped(self: Decoder, ids: Tensor, positions: Tensor, attend: Any, wanted: Tensor, *_: Any) -> Tensor:
        inputs = LayerInputs((0, 1, 3), self.build)
        hidden = computed(self, ids, positions, attend, inputs=inputs)
        found[self.build.ranks] = torch.cat((inputs.rows(), hidden), -1)
        return hidden.index_select(0, wanted)

    monkeypatch.setattr(Decoder, "__call__", tapped)
    sampled(folder, ALONE, STEPS[:1])
    for _, ranks in together(tmp_path, lambda ranks: sampled(folder, ranks, STEPS[:1], **TWO)):
        torch.testing.assert_close(found[ranks], found[ALONE])
        assert ranks.sums.count(("begun", 3)) == 6, "all layers compute all rows"


class Sending(Stage):
    """The first of two, of which there is no other."""

    def __init__(self) -> None:
        super().__init__(0, 2, range(2))
        self.sent: list[Tensor] = []

    def connect(self, *_: Any) -> None:
        """There is nobody to meet."""

    def send(self, hidden: Tensor) -> None:
        self.sent.append(hidden.clone())


def test_stages_hand_on_joined_rows(tmp_path: Path) -> None:
    folder, alone, shared = make_checkpoint("llama_bias", tmp_path, num_hidden_layers=4), Sending(), Sending()
    sampled(folder, Ranks(stage=alone), STEPS[:1], pipeline_parallel_size=2)
    options = TWO | {"pipeline_parallel_size": 2}
    [(_, ranks), _] = together(tmp_path, lambda ranks: sampled(folder, ranks, STEPS[:1], **options), shared)
    assert ranks.sums[-2:] == NEXT and len(shared.sent) == 2
    for rows in shared.sent:
        torch.testing.assert_close(rows, alone.sent[0])


@pytest.mark.parametrize("coding", [None, Coding("int8")])
def test_a_norm_waits_for_a_sum_and_rounds_it(coding: Coding | None, tmp_path: Path) -> None:
    x, residual = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(0)).unbind()
    method: Any = type("Method", (), {"coding": lambda self, rows: coding})()

    def rounded(ranks: Turns) -> tuple[Tensor, Tensor | RowCodes]:
        build = Build(torch.float32, CPU, 64, frozenset({"norm"}), ranks=ranks, late_sums=True)
        norm = SummingRMSNorm(NormSpec("rms", 1e-5), 48, "norm", build)
        norm.weight.data.fill_(2)
        return norm.before(method, residual.clone(), ranks.begin_sum(x.clone()))

    normal = rms_norm(residual + 2 * x, torch.full((48,), 2.0), 1e-5)
    for (hidden, found), _ in together(tmp_path, rounded):
        torch.testing.assert_close(hidden, residual + 2 * x)
        torch.testing.assert_close(found, normal if coding is None else coding(normal))


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_quantized_layers_answer_alike_in_halves(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("llama_bias", tmp_path, num_hidden_layers=3)
    options = TWO | {"quantization": quantization}

    def answers(place: str) -> list[tuple[Any, Turns]]:
        (tmp_path / place).mkdir()
        return together(tmp_path / place, lambda ranks: sampled(folder, ranks, **options))

    found = answers("halves")
    monkeypatch.setattr(halves, "HALVED_ROWS", 1000)
    whole = answers("whole")
    assert [said for said, _ in found] == [said for said, _ in whole]
    assert [("begun", 3) in ranks.sums for _, ranks in (*found, *whole)] == [True, True, False, False]


def test_steps_are_halved_where_there_is_work_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert least_rows(428 * 10**6) == 1024, "rows of Llama-3.1-70B on two ranks"
    assert least_rows(10**6) == 200_000, "a host has no time to launch more kernels"


@pytest.mark.parametrize("deterministic", [False, True])
def test_steps_stay_whole(deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose rows use adapters, and those whose rows must not depend on how many there are."""
    folder, computed = make_checkpoint("llama_bias", tmp_path), Decoder.forward

    def adapted(self: Decoder, ids: Tensor, positions: Tensor, attend: Any, wanted: Tensor, *_: Any) -> Tensor:
        return computed(self, ids, positions, attend, wanted, StepAdapters())

    if not deterministic:
        monkeypatch.setattr(Decoder, "__call__", adapted)
    options = TWO | {"deterministic": deterministic}
    for _, ranks in together(tmp_path, lambda ranks: sampled(folder, ranks, STEPS[:1], **options)):
        assert {rows for _, rows in ranks.sums} == {5, 1}
