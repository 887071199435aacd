"""Products with quantized weights on a GPU, of every form, on the shapes of Llama-3.1-8B, beside cuBLAS in bfloat16.

    python benchmarks/quantized.py
    python benchmarks/quantized.py --forms int4 fp8 q4_k --rows 1 32

For each form and number of rows: microseconds of the four products of a layer with the fastest way that layers choose
from, the share of the card's bandwidth at which codes and scales are read, and of cuBLAS's time. Below, what that makes
of the 32 layers of a decode, and the ways that were the fastest. Of several rows, products of codes with codes stand
beside: the time that making codes of activations takes is not in them.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from tests.support.kernel_list import Inputs
from tests.support.kernel_list.entry import PackedKind
from tests.support.kernel_list.quantized import FORMS, bytes_of, kind_of_form, random_packed

from kvern.device.timing import time_calls
from kvern.formats.gpu.candidates import OfCodes, candidates_of, codes_candidates, fitted
from kvern.formats.gpu.products import codes_product, counters
from kvern.kernels.arrange import arrange
from kvern.kernels.codes import INTERLEAVED, readable
from kvern.kernels.codes_hopper import tiles_codes
from kvern.kernels.launch import capability
from kvern.kernels.linear import MatmulShape, MatvecShape
from kvern.kernels.packed import Packed
from kvern.kernels.packed_product import packed_product, packed_row
from kvern.kernels.stream_hopper import streams_codes

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate, up": (28672, 4096), "down": (4096, 14336)}
LAYERS = 32
ROTATED_BYTES = 512 << 20
"""Weights are taken in turns from this much memory, so that none is still in the L2 cache."""
Way = Callable[[Packed], torch.Tensor]


def multiply(shape: MatvecShape | MatmulShape, x: torch.Tensor, weight: Packed) -> torch.Tensor:
    if isinstance(shape, MatvecShape):
        return packed_row(x, weight, None, shape)
    apart = weight.code in INTERLEAVED
    values = arrange(x, None, "planes") if apart else x
    return packed_product(values, weight, None, shape, counters(x.device))


def by_codes(cut: OfCodes, codes: torch.Tensor, scale: torch.Tensor, weight: Packed) -> torch.Tensor:
    return codes_product(cut, codes, scale, weight, None, torch.bfloat16)


def ways(kind: PackedKind, rows: int, x: torch.Tensor) -> dict[str, Way]:
    candidates = candidates_of(torch.bfloat16)
    most = min((most for most in candidates if most >= rows), default=max(candidates))
    fitting = [fitted(shape, kind.code) for shape in candidates[most]]
    shapes = [shape for shape in fitting if isinstance(shape, MatvecShape | MatmulShape)]
    found: dict[str, Way] = {str(tuple(shape)): partial(multiply, shape, x) for shape in shapes}
    if rows > 1 and kind.code in ("e4m3", "int8") and not kind.zero:
        dtype = torch.int8 if kind.code == "int8" else torch.float8_e4m3fn
        codes = (x * 20).to(dtype)
        runs = 1 if kind.group == kind.inputs else kind.inputs // kind.group
        scale = torch.ones(rows, runs, device=x.device)
        streams = tiles = False
        if capability(x.device) == 90:
            streams = streams_codes(kind.code, kind.group, kind.outputs, kind.inputs)
            packed = random_packed(Inputs(torch.device("cpu"), x.dtype, "empty"), kind, 1)
            tiles = tiles_codes(packed, kind.outputs, kind.inputs, x.dtype)
        for cut in codes_candidates(most, streams, tiles):
            found[f"{cut.kind} {tuple(cut[:-1])}"] = partial(by_codes, cut, codes, scale)
    return found


def timed(make: Callable[[], Callable[[], object]], size: int) -> float:
    calls = [make() for _ in range(max(2, min(16, ROTATED_BYTES // size)))]
    return time_calls(calls)


def measure(form: str, rows: int, outputs: int, width: int) -> tuple[float, int, str]:
    """Seconds of the fastest way, the bytes it reads, and its name."""
    kind = kind_of_form(form, outputs, width)
    inputs = Inputs(torch.device("cuda"), torch.bfloat16)
    x = inputs.numbers(rows, width)
    size = bytes_of(random_packed(inputs, kind, outputs))
    copies = [readable(random_packed(inputs, kind, outputs)) for _ in range(max(2, min(16, ROTATED_BYTES // size)))]
    best: tuple[float, int, str] | None = None
    for name, way in ways(kind, rows, x).items():
        try:
            seconds = time_calls([partial(way, weight) for weight in copies])
        except Exception as error:
            print(f"{form}, {rows} rows, {name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            continue
        if best is None or seconds < best[0]:
            best = seconds, size, name
    assert best is not None
    return best


def cublas(rows: int, outputs: int, width: int) -> float:
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)

    def make() -> Callable[[], object]:
        return partial(F.linear, x, torch.randn(outputs, width, device="cuda", dtype=torch.bfloat16))

    return timed(make, 2 * outputs * width)


def bandwidth() -> float:
    numbers = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    return numbers.nbytes / time_calls([lambda: numbers.sum()] * 4)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", default=[*FORMS], choices=[*FORMS])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 64, 4096])
    given = parser.parse_args(arguments)
    most = bandwidth()
    print(f"{torch.cuda.get_device_name()}: reads {most / 1e12:.2f} TB/s")
    plain = {(rows, name): cublas(rows, *shape) for rows in given.rows for name, shape in SHAPES.items()}
    print(f"{'form':12} {'rows':>5} " + " ".join(f"{name:>22}" for name in SHAPES) + f" {'32 layers, ms':>22}")
    chosen: dict[tuple[str, int], list[str]] = {}
    with torch.inference_mode():
        for form in given.forms:
            for rows in given.rows:
                cells, total, reference = [], 0.0, 0.0
                for name, (outputs, width) in SHAPES.items():
                    seconds, size, way = measure(form, rows, outputs, width)
                    total, reference = total + seconds, reference + plain[rows, name]
                    share, of_plain = size / seconds / most, seconds / plain[rows, name]
                    cells.append(f"{1e6 * seconds:8.1f} us {share:4.0%} {of_plain:4.0%}".rjust(22))
                    chosen.setdefault((form, rows), []).append(f"{name} {way}")
                layers = f"{1e3 * LAYERS * total:.2f} of {1e3 * LAYERS * reference:.2f}"
                print(f"{form:12} {rows:5} " + " ".join(cells) + f" {layers:>22}", flush=True)
    print("\nfastest ways: (rows, outputs, inputs, warps, stages, splits), of one row (outputs, inputs, warps, ...)")
    for (form, rows), names in chosen.items():
        print(f"{form:12} {rows:5} " + "; ".join(names))


if __name__ == "__main__":
    main()
