"""Steps of many rows in two halves, which ranks move to each other meanwhile: as one process answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvern.runner.worker
from kvern.kernels.norm import add_rms_norm
from kvern.layers import halves
from kvern.layers.halves import least_rows
from kvern.layers.step_context import StepAdapters
from kvern.models.decoder import Decoder, LayerInputs
from kvern.ranks.ranks import ALONE, Ranks
from kvern.ranks.stages import WHOLE, Stage
from tests.support.families import make_checkpoint
from tests.support.kernel_list import KERNELS
from tests.support.kernels.rank_turns import STEPS, Turns, sampled, together

pytestmark = [
    pytest.mark.usefixtures("few_products"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted in turns"),
]
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
LAYER = [
    ("begin", 0), ("norm", 0), ("begin", 1), ("normal", 0), ("norm", 1), ("begin", 0), ("normal", 1)
]  # fmt: skip
"""From the products behind attention on: what is sent and awaited is beside a product of the other half."""
NEXT = [("norm", 0), ("begin", 1), ("normal", 0), ("norm", 1), ("normal", 1)]
"""Before the products of the next layer: the last product of the one before is computed meanwhile."""
JOINED = [("begin", 1), ("whole", 0), ("whole", 1)]
"""Before whoever knows no halves."""


class Norms:
    """As `SharedNorms`, without memory of each other: what is another rank's of the residual is not there."""

    rows, width, dtype = 8, 48, torch.float32

    def __init__(self, ranks: Turns) -> None:
        self._ranks = ranks
        self.calls = [("", 0)][:0]
        self._x, self._normal, self._whole = ([torch.empty(0)] * 2 for _ in range(3))

    def begin(self, half: int, x: Tensor) -> None:
        self.calls.append(("begin", half))
        self._x[half] = x

    def norm(self, half: int, hidden: Tensor, weight: Tensor, epsilon: float) -> None:
        self.calls.append(("norm", half))
        whole = self._of_all(hidden)
        self._normal[half] = add_rms_norm(whole, self._ranks.group_sum(self._x[half]), weight, epsilon)
        hidden.copy_(whole)
        self._lose(hidden)

    def normal(self, half: int, count: int) -> Tensor:
        self.calls.append(("normal", half))
        assert count == len(self._normal[half])
        return self._normal[half]

    def make_whole(self, half: int, hidden: Tensor) -> None:
        self.calls.append(("whole", half))
        hidden.copy_(self._of_all(hidden) + self._ranks.group_sum(self._x[half]))

    def _of_all(self, hidden: Tensor) -> Tensor:
        """The residual, of which each rank says its own rows."""
        known = hidden.clone()
        self._lose(known, 0.0)
        return self._ranks.group_sum(known)

    def _lose(self, hidden: Tensor, left: float = torch.nan) -> None:
        most = -(-len(hidden) // 2)
        hidden[most:] = left if self._ranks.rank == 0 else hidden[most:]
        hidden[:most] = left if self._ranks.rank == 1 else hidden[:most]


def in_halves(
    folder: Path, compute: Callable[[Turns], Any], stage: Stage = WHOLE
) -> list[tuple[Any, list[tuple[str, int]]]]:
    """What each of two ranks computes that share norms, and what those were asked."""

    def run(ranks: Turns) -> Any:
        ranks.norms = Norms(ranks)  # type: ignore[assignment]
        return compute(ranks)

    return [(found, ranks.norms.calls) for found, ranks in together(folder, run, stage)]  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def small_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels, and halves of three rows and more."""
    groups = frozenset(kernel.group for kernel in KERNELS if not kernel.group.startswith("hopper"))
    monkeypatch.setattr(kvern.runner.worker, "usable_kernels", lambda *_: (groups, groups))
    for name, value in {"HALVED_ROWS": 3, "HALVED_WORK": 1, "TILE_ROWS": 1}.items():
        monkeypatch.setattr(halves, name, value)


def test_rows_of_a_half_are_moved_beside_products_of_the_other(tmp_path: Path) -> None:
    folder = make_checkpoint("llama_bias", tmp_path, num_hidden_layers=4)
    expected = sampled(folder, ALONE)
    for answers, calls in in_halves(tmp_path, lambda ranks: sampled(folder, ranks, **TWO)):
        assert answers == expected
        prompt = [*LAYER, *NEXT, *LAYER, *NEXT, *LAYER, *JOINED]
        assert calls[: len(prompt)] == prompt, "the last layer joins the halves and computes one row"


@pytest.mark.nightly
def test_layers_with_experts_join_the_halves_of_those_without(tmp_path: Path) -> None:
    folder = make_checkpoint("glm4_moe", tmp_path)
    expected = sampled(folder, ALONE)
    for answers, calls in in_halves(tmp_path, lambda ranks: sampled(folder, ranks, **TWO)):
        assert answers == expected
        assert calls[: len(LAYER) + len(JOINED)] == [*LAYER, *JOINED]


@pytest.mark.nightly
def test_layers_without_experts_halve_what_those_with_some_hand_on(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path, num_hidden_layers=3, mlp_only_layers=[1])
    expected = sampled(folder, ALONE)
    for answers, calls in in_halves(tmp_path, lambda ranks: sampled(folder, ranks, **TWO)):
        assert answers == expected
        assert calls[: 1 + len(NEXT) + len(LAYER) + len(JOINED)] == [("begin", 0), *NEXT, *LAYER, *JOINED]


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
    for _, calls in in_halves(tmp_path, lambda ranks: sampled(folder, ranks, STEPS[:1], **TWO)):
        assert calls.count(("begin", 0)) == 6, "all layers compute all rows"
    assert len(found) == 3
    for rows in found.values():
        torch.testing.assert_close(rows, found[ALONE])


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
    [(_, calls), _] = in_halves(tmp_path, lambda ranks: sampled(folder, ranks, STEPS[:1], **options), shared)
    assert calls[-3:] == JOINED and len(shared.sent) == 2
    for rows in shared.sent:
        torch.testing.assert_close(rows, alone.sent[0])


@pytest.mark.nightly
@pytest.mark.parametrize("quantization", ["fp8", pytest.param("int8", marks=pytest.mark.nightly)])
def test_quantized_layers_answer_alike_in_halves(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("llama_bias", tmp_path, num_hidden_layers=2)
    options = TWO | {"quantization": quantization}

    def answers(place: str) -> list[tuple[Any, list[tuple[str, int]]]]:
        (tmp_path / place).mkdir()
        return in_halves(tmp_path / place, lambda ranks: sampled(folder, ranks, **options))

    found = answers("halves")
    monkeypatch.setattr(halves, "HALVED_ROWS", 1000)
    whole = answers("whole")
    assert [said for said, _ in found] == [said for said, _ in whole]
    assert [bool(calls) for _, calls in (*found, *whole)] == [True, True, False, False]


def test_steps_are_halved_where_there_is_work_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert least_rows(428 * 10**6) == 1024, "rows of Llama-3.1-70B on two ranks"
    assert least_rows(10**6) == 400_000, "a host has no time to begin so many copies"


@pytest.mark.parametrize("deterministic", [False, True])
def test_steps_stay_whole(deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose rows use adapters, and those whose rows must not depend on how many there are."""
    folder, computed = make_checkpoint("llama_bias", tmp_path), Decoder.forward

    def adapted(self: Decoder, ids: Tensor, positions: Tensor, attend: Any, wanted: Tensor, *_: Any) -> Tensor:
        return computed(self, ids, positions, attend, wanted, StepAdapters())

    if not deterministic:
        monkeypatch.setattr(Decoder, "__call__", adapted)
    options = TWO | {"deterministic": deterministic}
    for _, calls in in_halves(tmp_path, lambda ranks: sampled(folder, ranks, STEPS[:1], **options)):
        assert not calls
