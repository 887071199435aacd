"""Comparison of each group of kernels with PyTorch on this machine.

    python -m kvern.cpu.check LIBRARY [GROUP ...]

prints a line for each group as soon as it is done: its name, and its fault if it has one. Missing lines tell the caller
where a kernel crashed. A check raises an AssertionError with the reason if a kernel is wrong.
"""

import math
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.cpu.attention import AttentionForm, CachedLayer, Step
from kvern.cpu.library import load
from kvern.cpu.linear import gated_linear, linear, linear_heads, pack, pack_heads, unpack
from kvern.cpu.packed import RUN, STEP, Groups, GroupsProduct, Int8Product, int8_rows, side_by_side
from kvern.cpu.ranks import SharedMemory
from kvern.cpu.rotary import Heads, rotate_and_store
from kvern.cpu.rows import ACTIVATIONS, NORMS, activate, add, add_norm, beside, scale, widened
from kvern.cpu.sampling import RowSampler, logprobs, read_decodes, restrict

THREADS = 2
"""The number of threads, so that jobs run in parallel."""


def close_to(found: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Raises AssertionError if results differ by more than `tolerance` times the largest number.

    None: the rounding error of the results' dtype.
    """
    largest = expected.abs().max().item()
    error = (found.double() - expected.double()).abs().max().item() / largest
    limit = tolerance or 2 * torch.finfo(found.dtype).eps
    assert error <= limit, f"off by {error:.2g} of the largest number, more than {limit:.2g}"


def check_elementwise(generator: torch.Generator) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, added = torch.randn(2, 13, 389, generator=generator).to(dtype)
        close_to(add(x.clone(), added), x.double() + added)
        close_to(scale(x.clone(), 1.375), x.double() * 1.375)
        assert torch.equal(widened(x), x.float()), "widened numbers are others"
        parts = (x, x[:, :7], added)
        assert torch.equal(beside(parts), torch.cat(parts, -1)), "rows stand elsewhere"


def check_norms(generator: torch.Generator) -> None:
    for dtype, width in ((torch.float32, 72), (torch.bfloat16, 389)):
        hidden, update = torch.randn(2, 19, width, generator=generator).to(dtype)
        weight, bias = torch.randn(2, width, generator=generator)
        total = hidden + update
        expected = F.rms_norm(total.double(), (width,), weight.double(), 1e-5)
        close_to(add_norm(hidden, update, weight, None, 1e-5, NORMS["rms"]), expected)
        assert torch.equal(hidden, total), "the sum is wrong"
        expected = F.layer_norm(total.double(), (width,), weight.double(), bias.double(), 1e-5)
        close_to(add_norm(hidden, None, weight, bias, 1e-5, NORMS["layer"]), expected)


def check_activations(generator: torch.Generator) -> None:
    for dtype, width in ((torch.float32, 72), (torch.bfloat16, 389)):
        x = (3 * torch.randn(19, 2 * width, generator=generator)).to(dtype)
        gate, up = x.double().chunk(2, -1)
        for kind, expected in (
            ("silu", F.silu(gate)),
            ("gelu", F.gelu(gate)),
            ("gelu_tanh", F.gelu(gate, approximate="tanh")),
            ("relu", F.relu(gate)),
            ("relu2", F.relu(gate).square()),
            ("quick_gelu", gate * (1.702 * gate).sigmoid()),
        ):
            close_to(activate(x, ACTIVATIONS[kind], True), expected * up)
            close_to(activate(x[:, :width], ACTIVATIONS[kind], False), expected)
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        close_to(activate(x, ACTIVATIONS["clamped_swiglu"], True), gate * (1.702 * gate).sigmoid() * (up + 1))


def check_rotary(generator: torch.Generator) -> None:
    for dtype, dim in ((torch.float32, 24), (torch.bfloat16, 64)):
        qkv = torch.randn(9, 5, dim, generator=generator).to(dtype)
        weight = torch.randn(4, dim, generator=generator)
        angles = torch.randn(50, dim // 2, generator=generator)
        cosine, sine = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
        table = torch.stack((cosine, sine), 1).unsqueeze(2).to(dtype)
        positions, places = torch.arange(3, 12), torch.randperm(16, generator=generator)[:9]
        cache = torch.full((2, 4, 4, 1, dim), 7.0, dtype=dtype)
        heads = Heads(3, 1, dim, dim, weight.data_ptr(), None, weight[3:].data_ptr(), None, 1e-5, 1)
        normal = F.rms_norm(qkv[:, :4].double(), (dim,), None, 1e-5) * weight.double()
        turned = table[positions].double().unbind(1)
        expected = normal * turned[0] + normal.roll(dim // 2, -1) * turned[1]
        value = qkv[:, 4:].clone()
        rotate_and_store(heads, qkv, positions, places, table, cache, None)
        close_to(qkv[:, :3], expected[:, :3])
        stored = cache.view(2, 16, 1, dim)
        close_to(stored[0, places], expected[:, 3:])
        assert torch.equal(stored[1, places], value), "values are stored wrongly"
        others = torch.ones(16, dtype=torch.bool).index_fill_(0, places, False)
        assert bool((stored[:, others] == 7).all()), "others are overwritten"


def check_linear(generator: torch.Generator) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, None)):
        for rows, outputs, inputs in ((1, 72, 40), (19, 150, 1037), (61, 64, 96)):
            weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
            x = torch.randn(rows, inputs, generator=generator).to(dtype)
            bias = torch.randn(outputs, generator=generator).to(dtype)
            expected = x.double() @ weight.double().T + bias.double()
            gate, up = expected.chunk(2, -1)
            packed, gated = pack(weight), pack(weight, gated=True)
            assert torch.equal(unpack(packed), weight), "a packed matrix is not what it was"
            some = unpack(packed, torch.tensor([4, 3, outputs + 4]), 4)
            assert torch.equal(some, weight[:1].new_zeros(3, inputs).index_copy(0, torch.tensor([0]), weight[:1])), (
                "rows of a part are others"
            )
            close_to(linear(x, packed, bias), expected, tolerance)
            close_to(linear(x, gated, bias), expected, tolerance)
            alone = torch.cat([linear(x[row : row + 1], packed, bias) for row in range(rows)])
            assert torch.equal(linear(x, packed, bias), alone), "rows depend on the rows beside them"
            close_to(gated_linear(x, gated, bias, ACTIVATIONS["silu"]), F.silu(gate) * up, tolerance)
            weights = torch.randn(3, outputs, inputs, generator=generator).to(dtype)
            rows_of_heads = torch.randn(rows, 3, inputs + 5, generator=generator).to(dtype)[..., :inputs]
            expected = torch.einsum("thi,hoi->tho", rows_of_heads.double(), weights.double())
            close_to(linear_heads(pack_heads(weights), rows_of_heads), expected, tolerance)


def check_attention(generator: torch.Generator) -> None:

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    heads = 6
    kv_heads = 2
    size = 16
    starts, counts = [0, 300, 41], [70, 1, 3]
    table = torch.randperm(60, generator=generator).int().view(3, 20)
    for dtype, head_dim, value_dim in ((torch.float32, 40, None), (torch.bfloat16, 64, None), (torch.float32, 72, 48)):
        cache = random(2 if value_dim is None else 1, 60, size, kv_heads, head_dim).to(dtype)
        query = random(sum(counts), heads, head_dim).to(dtype)
        forms = ((None, True),) if value_dim is not None else ((None, True), (None, False), (20, False))
        for window, causal in forms:
            layer = CachedLayer(cache, None, dtype, AttentionForm(heads, 0.2, window, None, value_dim, causal))
            found = layer.attend(Step(table, torch.tensor([[0, 1, 2], starts, counts])), query)
            expected = []
            for row, start, tokens in zip(table, starts, query.split(counts), strict=True):
                end = start + len(tokens)
                stored = cache[:, row.long()].flatten(1, 2)[:, :end].transpose(1, 2).double()
                key, value = stored[0], stored[-1][..., :value_dim]
                ahead = torch.arange(end) - torch.arange(start, end)[:, None]
                hidden = (ahead > 0) & causal | (ahead.abs() >= (window or end))
                mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, float("-inf"))
                attended = F.scaled_dot_product_attention(
                    tokens.double().transpose(0, 1)[None], key[None], value[None], mask, scale=0.2, enable_gqa=True
                )
                expected.append(attended[0].transpose(0, 1))
            close_to(found, torch.cat(expected), 1e-5 if dtype == torch.float32 else 1e-2)


def rounded_in_runs(x: Tensor, run: int) -> Tensor:
    """The rounded activations, [T, inputs] float64, with one scale for each `run` inputs, computed by PyTorch."""
    runs = x.float().view(len(x), -1, run)
    scale = (runs.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-12)
    return ((runs / scale).round().double() * scale).flatten(-2)


def check_groups(generator: torch.Generator) -> None:
    outputs, inputs = 83, 192
    for dtype, rows, group, wide in (
        (torch.float32, 5, 64, False), (torch.bfloat16, 1, 64, False), (torch.bfloat16, 5, 32, False),
        (torch.bfloat16, 5, 16, True),
    ):  # fmt: skip
        x, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, inputs), (outputs,)))
        width = inputs if wide else inputs // 2
        codes = torch.randint(0, 256, (outputs, width), dtype=torch.uint8, generator=generator)
        scale = (torch.rand(outputs, inputs // group, generator=generator) / 64).half()
        zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8, generator=generator)
        numbers = codes.view(torch.int8) if wide else torch.stack((codes & 15, codes >> 4), -1)
        plain = (numbers.view(*scale.shape, group).double() - zero.unsqueeze(-1)) * scale.unsqueeze(-1)
        matrix = Groups(
            side_by_side(codes, STEP), None if wide else range(16), side_by_side(scale), side_by_side(zero), group
        )
        rounded = dtype == torch.bfloat16
        found = GroupsProduct(matrix, outputs, rounded)(x, bias)
        used = rounded_in_runs(x, min(group, RUN)) if rounded else x.double()
        close_to(found, used @ plain.flatten(1).t() + bias, None if rounded else 1e-5)


def check_int8(generator: torch.Generator) -> None:
    for dtype, rows, outputs, inputs in ((torch.float32, 9, 83, 102), (torch.bfloat16, 1, 128, 640)):
        x, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, inputs), (outputs,)))
        codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, generator=generator)
        scale = torch.rand(outputs, 1, generator=generator) / 64
        expected = rounded_in_runs(x, inputs) @ codes.t().double() * scale.t() + bias
        lanes = side_by_side(codes, STEP), side_by_side(scale)
        close_to(Int8Product(*lanes, outputs)(x, bias), expected)
        ids = torch.tensor([outputs - 1, 0, 17, outputs + 9])
        plain = torch.mul(codes, scale).to(dtype).index_select(0, ids[:3])
        for first in (0, 5):
            read = int8_rows(*lanes, (outputs, inputs), dtype, ids + first, first)
            assert torch.equal(read, F.pad(plain, (0, 0, 0, 1))), "rows are others"


class _ThreeRows:
    """Three rows, as in `kvern.device.rows`, with the text 1 2 2: greedy, sampled, and sampled with top-k 1.

    The prompt is token 1, token 2 is penalized, token 3 is banned in the last row.
    """

    tokens = torch.tensor([[1, 2, 2, 7]] * 3, dtype=torch.int32)
    seeds = torch.tensor([5, -6, 7])
    top_k = torch.tensor([0, 0, 1])
    changes = torch.tensor([0, 1, 3])
    prompt_lengths = torch.tensor([1, 1, 1])
    temperature = torch.tensor([0.0, 0.7, 1.3])
    top_p, min_p, typical_p = torch.tensor([[1.0, 1.0, 0.9], [0.0, 0.0, 0.1], [1.0, 1.0, 0.8]])
    repetition, presence, frequency = torch.tensor([[1.0, 2.0, 1.0], [0.0, 0.5, 0.5], [0.0, 0.25, 0.25]])
    ban = torch.tensor([0, 0, 1, 1000, 0, 0, 3], dtype=torch.int32)
    """Lists of the last row: no biases, one token that ends, and that only from position 1000 on."""
    lists = torch.tensor([0, 0, ban.data_ptr()])


def _uniform(seed: int, position: int, token: int) -> float:
    """The number of `kvern.sample.random.uniform`."""
    golden = 0x9E3779B97F4A7C15
    wide = 2**64 - 1
    narrow = 2**32 - 1
    key = (seed + golden) & wide
    for added in (0, position * golden):
        key = (key + added) & wide
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & wide
        key = (key ^ key >> 27) * 0x94D049BB133111EB & wide
        key ^= key >> 31
    value = token * 0x9E3779B1 & narrow ^ key & narrow
    value = (value ^ value >> 16) * 0x7FEB352D & narrow
    value = (value ^ value >> 15 ^ key >> 32) * 0x846CA68B & narrow
    value = (value ^ value >> 16) & 0x7FFFFFFF
    return min((float(torch.tensor(value, dtype=torch.float32)) + 0.5) * 2.0**-31, 1 - 2.0**-24)


def check_sampling(generator: torch.Generator) -> None:
    slots, positions = torch.arange(3), torch.tensor([3, 3, 3])
    sampler = RowSampler(_ThreeRows())
    for dtype, vocabulary in ((torch.float32, 5003), (torch.bfloat16, 4096)):
        logits = torch.randn(3, vocabulary, generator=generator).to(dtype)
        greedy, drawn, best = sampler.sample(logits, slots, positions).tolist()
        highest = logits.argmax(-1).tolist()
        assert [greedy, best] == [highest[0], highest[2]], "the most probable tokens are wrong"
        times = torch.tensor([-math.log1p(-_uniform(-6, 3, token)) for token in range(vocabulary)])
        assert drawn == int((logits[1].double() / 0.7 - times.log()).argmax()), "the draw is wrong"
        own, ranks, ids, values = logprobs(logits, slots, 5)
        expected = logits.double().log_softmax(-1)
        close_to(own, expected[slots, slots], 1e-5)
        close_to(values, expected.topk(5).values, 1e-5)
        assert torch.equal(expected.gather(1, ids), expected.topk(5).values), "the most probable tokens are wrong"
        assert ranks.tolist() == [int((row > row[token]).sum()) + 1 for token, row in enumerate(logits)], "wrong ranks"
        masks = torch.randint(-(2**31), 2**31, (1, -(-vocabulary // 32)), generator=generator).int()
        allowed = (masks.view(torch.uint8)[0, :, None] >> torch.arange(8)).flatten()[:vocabulary] & 1
        masked = logits.clone()
        restrict(masked, slots[1:2], masks)
        assert torch.equal(masked[1], logits[1].where(allowed > 0, -torch.inf)), "the mask is wrong"
    scores = logits.float()
    changed = scores.clone()
    sampler.constrain(changed, slots, positions)
    scores[1, 1:3] = torch.where(scores[1, 1:3] > 0, scores[1, 1:3] / 2, scores[1, 1:3] * 2)
    scores[1:, 2] -= 0.5 + 2 * 0.25
    scores[2, 3] = -torch.inf
    assert torch.allclose(changed, scores), "the constraints are wrong"
    sampler.write(slots, positions, slots + 20)
    assert sampler.tokens[:, 3].tolist() == [20, 21, 22], "the tokens stand elsewhere"
    blocks = torch.tensor([[5, 9], [6, 4], [7, 8]], dtype=torch.int32)
    turns = torch.tensor([0, 0, 3]), torch.tensor([0, 0, -2])
    inputs = read_decodes(torch.tensor([[2, 0], [3, 1]]), sampler.tokens, blocks, turns, 2)
    wanted = [[22, 2], [1, 1], [17, 11], [4, 2]]
    assert [item.tolist() for item in inputs] == wanted, "other tokens or places are read"


def check_ranks(generator: torch.Generator) -> None:
    size = 3
    with TemporaryDirectory() as folder, ThreadPoolExecutor(size) as pool:

        def meet(rank: int) -> SharedMemory:
            return SharedMemory(Path(folder, "meeting"), rank, size, 60.0)

        ranks = list(pool.map(meet, range(size)))
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(size, 300, 389, generator=generator).to(dtype)  # more than a piece
            for found in pool.map(SharedMemory.sum, ranks, x.clone()):
                close_to(found, x.double().sum(0))
            for found in pool.map(SharedMemory.beside, ranks, x, [1100] * size):
                assert torch.equal(found, torch.cat([*x], -1)[:, :1100]), "rows stand elsewhere"
            for found in pool.map(SharedMemory.first, ranks, x.clone()):
                assert torch.equal(found, x[0]), "it is not the first one's"


Check = Callable[[torch.Generator], None]
GROUPS: Mapping[str, tuple[Check, ...]] = {
    "cpu_layers": (check_elementwise, check_norms, check_activations, check_rotary),
    "cpu_linear": (check_linear,),
    "cpu_attention": (check_attention,),
    "cpu_packed": (check_int8, check_groups),
    "cpu_sampling": (check_sampling,),
    "cpu_ranks": (check_ranks,),
}
"""The checks of each group."""


def main() -> None:
    """The command above."""
    load(Path(sys.argv[1]), THREADS)
    for name in sys.argv[2:] or GROUPS:
        try:
            for check in GROUPS[name]:
                check(torch.Generator().manual_seed(0))
            problem = ""
        except Exception as error:  # whatever it is, the engine does without this group
            problem = " ".join(f"{type(error).__name__}: {error}".split())
        sys.stdout.write(f"{name} {problem}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
