"""Tensors are found through whatever an engine is made of."""

from functools import partial

import torch
from torch import Tensor, nn

from kvern.runner.cached_model import StateStack
from kvern.runner.tensors import all_tensors, tensors_in


def test_tensors_are_found_in_containers_modules_closures_and_each_other() -> None:
    made = [torch.zeros(3) for _ in range(6)]
    layer = nn.Linear(2, 2)
    value: dict[str, object] = {
        "list": [made[0], (made[1], {"deep": made[2]})],
        "tuple": StateStack([0], [made[3]]),
        "partial": partial(torch.add, made[4]),
        "function": lambda: made[5],
        "module": layer,
        "others": [None, "text", 3.0, object()],
    }
    value["itself"] = value
    found = {id(tensor) for tensor in tensors_in(value)}
    assert found == {id(tensor) for tensor in [*made, layer.weight, layer.bias]}
    everything = {id(tensor) for tensor in all_tensors()}
    assert found <= everything


def test_a_chain_of_any_length_is_followed() -> None:
    chain: list[object] = [torch.zeros(1)]
    for _ in range(5000):
        chain = [chain]
    assert sum(isinstance(one, Tensor) for one in tensors_in(chain)) == 1
