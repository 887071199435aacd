"""Calls of kernels for CPUs that are captured and made again."""

import threading
import time
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvern.cpu.capture import ALIGNMENT, Buffer, Memory, Program, Uncapturable, place
from kvern.cpu.library import mark
from kvern.cpu.linear import PackedWeight, gated_linear, linear, pack
from kvern.cpu.rows import ACTIVATIONS, add, add_norm, scale
from kvern.cpu.sampling import read_decodes
from tests.support.cache_folder import load_kernels

WIDTH = 96


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request: pytest.FixtureRequest) -> None:
    load_kernels("cpu_layers", request.param)


class Layers:
    """A model of some layers, for rows that lie in `x`."""

    def __init__(self, dtype: torch.dtype, rows: int, layers: int) -> None:
        generator = torch.Generator().manual_seed(layers)
        self.x = torch.zeros(rows, WIDTH, dtype=dtype)
        self.identity = pack(torch.eye(WIDTH, dtype=dtype))
        self.bias = torch.randn(WIDTH, generator=generator).to(dtype)
        self.scale = torch.rand(WIDTH, generator=generator)
        self.weights: list[tuple[PackedWeight, PackedWeight]] = []
        for _ in range(layers):
            gate_up, down = torch.randn(3, WIDTH, WIDTH, generator=generator).to(dtype).split([2, 1])
            self.weights.append((pack(gate_up.flatten(0, 1) / 10, gated=True), pack(down[0] / 10)))

    def first(self) -> tuple[Tensor, ...]:
        hidden = scale(linear(self.x, self.identity, None), 1.5)
        for gate_up, down in self.weights:
            normal = add_norm(hidden, None, self.scale, None, 1e-5, 1)
            add(hidden, linear(gated_linear(normal, gate_up, None, ACTIVATIONS["silu"]), down, self.bias))
        return (hidden,)

    def second(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return linear(hidden, self.weights[0][1], None, torch.float32), hidden[1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_programs_compute_what_was_captured(dtype: torch.dtype) -> None:
    """In memory that they share and that moves as it grows."""
    memory, generator = Memory(), torch.Generator().manual_seed(0)
    models = [Layers(dtype, rows, layers) for rows, layers in ((2, 1), (40, 3), (5, 6))]
    programs: list[Program] = []
    for model in models:
        programs.append(Program(memory, model, model.first, model.second))
        assert torch.equal(programs[-1].run(0, 0)[0], model.first()[0])
        for earlier, program in zip(models, programs, strict=False):
            for _ in range(2):
                earlier.x.copy_(torch.randn(earlier.x.shape, generator=generator))
                memory.bytes.fill_(255)  # what was there is not read
                (hidden,) = earlier.first()
                expected, tail = earlier.second(hidden)
                assert torch.equal(program.run(0, 0)[0], hidden)
                scores, found = program.run(1, 1)
                assert torch.equal(scores, expected)
                assert torch.equal(found, tail)


def test_memory_is_used_again() -> None:
    """Deep models take no more than shallow ones."""
    few, many = Memory(), Memory()
    for memory, layers in ((few, 2), (many, 30)):
        model = Layers(torch.float32, 16, layers)
        Program(memory, model, model.first)
    assert len(many.bytes) == len(few.bytes) > 0


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: (x + 1,),
        lambda x: (x.float(),),
        lambda x: (x[:, ::2].contiguous(),),
        lambda x: (x.view(-1)[x.argmax()],),
        lambda x: (x.mul_(2),),
        lambda x: (torch.zeros(3),),
    ],
)
def test_what_pytorch_computes_is_not_captured(compute: Callable[[Tensor], tuple[Tensor]]) -> None:
    model = Layers(torch.bfloat16, 4, 1)
    with torch.inference_mode(), pytest.raises(Uncapturable):
        Program(Memory(), model, model.first, compute)


@pytest.mark.skipif(not torch._C._has_mkldnn, reason="PyTorch was built without oneDNN")
def test_weights_in_a_format_of_a_library_are_not_captured() -> None:
    """They have no memory that PyTorch knows of."""
    packed, x = torch.ops.mkldnn._reorder_linear_weight(torch.ones(WIDTH, WIDTH), 1), torch.ones(2, WIDTH)
    model = Layers(torch.float32, 2, 1)

    def compute(hidden: Tensor) -> tuple[Tensor, ...]:
        return (torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""),)

    with torch.inference_mode(), pytest.raises(Uncapturable, match="PyTorch computes _linear_pointwise"):
        Program(Memory(), model, model.first, compute)


def test_calls_of_other_threads_are_theirs() -> None:
    model, other = Layers(torch.float32, 3, 2), Layers(torch.float32, 50, 1)

    def first() -> tuple[Tensor, ...]:
        thread = threading.Thread(target=other.first)
        thread.start()
        thread.join()
        return model.first()

    program = Program(Memory(), model, first)
    model.x.fill_(0.5)
    assert torch.equal(program.run(0, 0)[0], model.first()[0])


def test_decodes_are_read_from_the_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 1000, (9, 64), dtype=torch.int32, generator=generator)[:, :50]
    table = torch.randint(0, 500, (9, 16), dtype=torch.int32, generator=generator)[:, :7]
    slots, positions = torch.tensor([[3, 8, 0], [49, 0, 16]])
    turns = torch.tensor([0] * 8 + [1]), torch.tensor([-5] * 9)
    found = read_decodes(torch.stack((slots, positions, positions)), tokens, table, turns, 8)
    turned = torch.tensor([44, 0, 11])
    blocks = table[slots, positions // 8].long()
    expected = tokens[slots, positions].long(), turned, blocks * 8 + positions % 8, positions + 1
    assert all(torch.equal(item, other) for item, other in zip(found, expected, strict=True))


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 20), st.integers(0, 8)), max_size=30))
def test_buffers_of_the_same_time_are_apart(sizes: list[tuple[int, int, int]]) -> None:
    buffers = [Buffer(0, size, first, first + length) for size, first, length in sizes]
    total = place(buffers)
    assert total == max((buffer.offset + buffer.size for buffer in buffers), default=0)
    for one, other in combinations(buffers, 2):
        if one.first <= other.last and other.first <= one.last:
            assert one.offset + one.size <= other.offset or other.offset + other.size <= one.offset
    assert all(buffer.offset % ALIGNMENT == 0 for buffer in buffers)


def test_marks_among_the_calls_are_timed_where_they_were_made(threads: None) -> None:
    memory, model = Memory(), Layers(torch.float32, 3, 2)

    def first() -> tuple[Tensor, ...]:
        mark(1)
        (hidden,) = model.first()
        mark(2)
        return (hidden,)

    def second(hidden: Tensor) -> tuple[Tensor, ...]:
        mark(3)
        scores = linear(hidden, model.weights[0][1], None, torch.float32)
        mark(4)
        mark(5)
        return (scores,)

    program = Program(memory, model, first, second)
    model.x.fill_(0.5)
    for stages, expected in (((0, 0), [1, 2, 3]), ((1, 1), [2, 3, 4, 5]), ((0, 1), [1, 2, 3, 4, 5])):
        plain = [found.clone() for found in program.run(*stages)]
        before = time.monotonic_ns()
        found, codes, times = program.run_timed(*stages)
        assert [*map(torch.equal, found, plain)] == [True] * len(plain)
        assert codes == expected
        taken = [before, *times, time.monotonic_ns()]
        assert taken == sorted(taken)
    mark(6)  # outside of a capture it is nothing
