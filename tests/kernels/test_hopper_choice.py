"""What is offered to be timed for a matrix on a Hopper GPU, and what is used then."""

import pytest
import torch

from kvern.kernels.linear import ProductShape, StreamShape
from kvern.layers.build import Build
from kvern.layers.linear_method import LinearShape
from kvern.layers.tuned_linear import BESIDE, OWN, HopperMethod, TunedLinear, TunedMethod

CPU = torch.device("cpu")


def method(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16, deterministic: bool = False) -> TunedMethod:
    build = Build(dtype, CPU, 64, frozenset({"hopper_linear"}), deterministic=deterministic)
    made = TunedLinear(CPU, "auto").linear(LinearShape(outputs, inputs, dtype, CPU), build)
    assert isinstance(made, TunedMethod)
    return made


def test_own_kernels_are_offered_beside_the_others() -> None:
    made = method(64, 32)
    offered = made.candidates()
    assert list(offered) == [1, *OWN]
    assert all(None in ways for ways in offered.values())
    assert set(offered[32]) == {None, *(tuple(shape) for shape in (*OWN[32], *BESIDE[32]) if shape)}


@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype"), [(64, 32, torch.float32), (60, 32, torch.float16), (64, 36, torch.bfloat16)]
)
def test_a_matrix_that_they_do_not_know(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    assert not isinstance(method(outputs, inputs, dtype), HopperMethod)


def test_nothing_is_offered_where_a_row_may_not_depend_on_their_number() -> None:
    assert not method(64, 32, deterministic=True).candidates()


def test_what_is_chosen_for_most_rows_is_used_for_more() -> None:
    made = method(64, 32)
    for rows, shape in ((32, StreamShape(32, 128, 64, 7, 1)), (8192, ProductShape(8))):
        made.choose(rows, tuple(shape))
    ways = {rows: made._way(torch.empty(rows, 1)) for rows in (16, 17, 32, 33, 1025, 9000)}
    assert ways == {16: None, 17: OWN[32][1], 32: OWN[32][1], 33: None, 1025: OWN[8192][0], 9000: OWN[8192][0]}


def test_gate_and_up_are_timed_with_their_activation() -> None:
    made = method(64, 32)
    assert made.gated("relu2") is None
    assert made.gated("silu") is not None
    assert "silu" in made.name
    assert set(made.candidates()[256]) == {None, (2,)}
    assert set(method(64, 32).candidates()[256]) == {None}
    assert set(made.candidates()[32]) & {tuple(shape) for shape in OWN[32] if shape} == {(32, 128, 64, 7, 1)}
