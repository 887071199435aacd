"""Checkpoints of bitsandbytes: INT8 (LLM.int8), and NF4 (Dettmers et al., QLoRA, 2023) in blocks of 64 inputs.

An NF4 matrix of O outputs and I inputs is `weight` uint8 [O * I / 2, 1], two inputs in a byte, the high four bits the
first; `weight.absmax`, a scale for each block; `weight.quant_map` [16], the numbers of the codes; and a
`weight.quant_state` of JSON. With double quantization absmax is uint8, codes of `weight.nested_quant_map` [256] times
`weight.nested_absmax`, one for 256 blocks, plus an offset; that is undone once all is loaded.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvern.errors import CorruptCheckpoint, UnsupportedModel
from kvern.formats.choice import all_but, paths_matching
from kvern.formats.groups import Form, GroupedFormat, GroupedMethod
from kvern.formats.scaled import Scaled, ScaledMethod
from kvern.kernels.packed import NF4
from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.linear_method import ANY, Axis, LinearMethod, LinearShape, Part, TensorLayout

Cell = tuple[slice, slice]
"""Rows and columns of a matrix."""
BLOCK, NESTED_BLOCK = 64, 256
STATE = "weight.quant_state.bitsandbytes__nf4"


@dataclass
class _State:
    """The tensors of a part that are read in addition to its codes and their scales."""

    part: Part
    text: bytes = b""
    tensors: dict[str, list[Tensor]] = field(default_factory=dict)


class Nf4Method(GroupedMethod):
    """A matrix of a bitsandbytes checkpoint. Until `finish` the scales of a nested one are the codes of its scales."""

    def __init__(self, shape: LinearShape, nested: bool) -> None:
        # 16 bits hold what double quantization left of a scale, and keep a matrix at the size of its file.
        super().__init__(shape, Form("nf4", BLOCK, torch.float16 if nested else torch.float32))
        self._nested = nested
        self._states: dict[int, _State] = {}

    def cuts(self) -> tuple[int, int]:
        return 1, BLOCK

    def layouts(self) -> Mapping[str, TensorLayout]:
        bytes_ = torch.uint8
        layouts = {
            "weight": TensorLayout(bytes_, (Axis("numbers", 2), Axis("others", 1))),
            "weight.absmax": TensorLayout(bytes_ if self._nested else torch.float32, (Axis("numbers", BLOCK),)),
            "weight.quant_map": TensorLayout(torch.float32, (Axis("others", 16),)),
            STATE: TensorLayout(bytes_, (Axis("others", ANY),)),
        }
        if self._nested:
            layouts["weight.nested_absmax"] = TensorLayout(torch.float32, (Axis("others", ANY),))
            layouts["weight.nested_quant_map"] = TensorLayout(torch.float32, (Axis("others", 256),))
        return layouts

    def load(self, kind: str, tensor: Tensor, part: Part, first_row: int = 0) -> None:
        if kind == "weight":
            for run, place in self._taken(tensor.view(-1), part, first_row, 2):
                codes = run.to(self.shape.device)
                self.codes[place].copy_(codes >> 4 | codes << 4)
        elif kind == "weight.absmax":
            for run, place in self._taken(tensor, part, first_row, BLOCK):
                self.scale[place].copy_(run)
        else:
            state = self._states.setdefault(part.first, _State(part))
            if kind == STATE:
                state.text += bytes(tensor.tolist())
            else:
                state.tensors.setdefault(kind.removeprefix("weight."), []).append(tensor.to("cpu", copy=True).float())

    def _taken(self, entries: Tensor, part: Part, first: int, numbers: int) -> Iterator[tuple[Tensor, Cell]]:
        """Yields the entries that this rank holds, and their place; an entry covers `numbers` numbers of a row."""
        width, outputs = _all_inputs(part) // numbers, part.outputs
        inputs = range(part.inputs.start // numbers, part.inputs.stop // numbers)
        begun = min(-first % width, len(entries))  # of a row that an earlier run began
        rest = (len(entries) - begun) % width
        for run in torch.split(entries, [begun, len(entries) - begun - rest, rest]):
            if len(run):
                row, column = divmod(first, width)
                first, run = first + len(run), run.view(-1, min(len(run), width))
                rows = range(max(row, outputs.start), min(row + len(run), outputs.stop))
                columns = range(max(column, inputs.start), min(column + run.shape[1], inputs.stop))
                if rows and columns:
                    below, left = part.first - outputs.start, inputs.start
                    place = (
                        slice(rows.start + below, rows.stop + below),
                        slice(columns.start - left, columns.stop - left),
                    )
                    run = run[rows.start - row : rows.stop - row, columns.start - column : columns.stop - column]
                    yield run, place

    def finish(self) -> None:
        for state in self._states.values():
            tensors = {kind: torch.cat(runs) for kind, runs in state.tensors.items()}
            rows, offset = self._check(state, tensors["quant_map"])
            if self._nested:
                self._undo_nesting(state.part, rows, offset, tensors["nested_quant_map"], tensors["nested_absmax"])
        self._states = {}
        if not (self.scale.is_meta or bool(self.scale.isfinite().all())):
            raise ValueError("the absmax of a block is not finite; the file is damaged, download it again")
        super().finish()

    def _check(self, state: _State, numbers: Tensor) -> tuple[int, float]:
        """Checks a part's quant_state; returns its number of rows and the offset of its nested scales.

        Raises ValueError.
        """
        try:
            found = json.loads(state.text)
            offset, rows = float(found.get("nested_offset", 0.0)), int(found.get("shape", [0])[0])
        except (ValueError, ArithmeticError, AttributeError, LookupError, TypeError, RecursionError):
            raise ValueError("its quant_state is no JSON that bitsandbytes writes") from None
        wanted = {
            "quant_type": "nf4",
            "blocksize": BLOCK,
            "shape": [max(rows, state.part.outputs.stop), _all_inputs(state.part)],
        } | ({"nested_blocksize": NESTED_BLOCK} if self._nested else {})
        for key, value in wanted.items():
            if found.get(key) != value:
                raise ValueError(f"its quant_state has the {key} {found.get(key)!r:.60}; what is read is {value}")
        if not torch.allclose(numbers, torch.tensor(NF4), rtol=0, atol=1e-6):
            raise ValueError("its quant_map is not that of NF4")
        return rows, offset

    def _undo_nesting(self, part: Part, rows: int, offset: float, numbers: Tensor, absmax: Tensor) -> None:
        scale = self.scale[part.first : part.first + len(part.outputs)]
        width = _all_inputs(part) // BLOCK
        if len(absmax) != -(-rows * width // NESTED_BLOCK):
            raise ValueError(
                f"its nested_absmax has {len(absmax)} entries, and there are {rows * width} blocks: one is for "
                f"{NESTED_BLOCK}"
            )
        numbers, absmax = numbers.to(scale.device), absmax.to(scale.device)
        row, column = (
            torch.arange(held.start, held.stop, device=scale.device)
            for held in (part.outputs, range(part.inputs.start // BLOCK, part.inputs.stop // BLOCK))
        )
        outer = absmax[(row[:, None] * width + column) // NESTED_BLOCK]
        scale.copy_(numbers[scale.long()] * outer + offset)


def _all_inputs(part: Part) -> int:
    return len(part.inputs) if part.all_inputs is None else part.all_inputs


def bitsandbytes_nf4(quantization: Mapping[str, Any], unquantized: LinearFormat) -> LinearFormat:
    """The format of bitsandbytes layers with `load_in_4bit`. Raises UnsupportedModel."""
    kind = quantization.get("bnb_4bit_quant_type", "fp4")
    if kind != "nf4":
        raise UnsupportedModel(
            f"bitsandbytes weights of the bnb_4bit_quant_type {kind!r:.40} are not supported: 'nf4' is; quantize the "
            "model with it"
        )
    storage = quantization.get("bnb_4bit_quant_storage", "uint8")
    if str(storage).removeprefix("torch.") != "uint8":
        raise UnsupportedModel(f"bitsandbytes weights stored as {storage!r:.40} are not supported: as uint8 they are")
    make = partial(Nf4Method, nested=bool(quantization.get("bnb_4bit_use_double_quant", False)))
    return GroupedFormat("NF4", make, BLOCK)


class Int8Method(ScaledMethod):
    """`weight` int8 and `SCB [outputs]`, the largest number of each row, which code 127 represents."""

    def layouts(self) -> Mapping[str, TensorLayout]:
        return {**super().layouts(), "weight_format": TensorLayout(torch.uint8, (), needed=False)}

    def load(self, kind: str, tensor: Tensor, part: Part, first_row: int = 0) -> None:
        if kind != "weight_format":
            super().load(kind, tensor, part, first_row)
        elif int(tensor) != 0:
            raise CorruptCheckpoint(f"weight_format of a layer is {int(tensor)}; kvern reads 0, weights stored by rows")


class Int8(Scaled):
    """LLM.int8 without rounded activations: bitsandbytes keeps some columns in 16 bits, kvern all of them."""

    def linear(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        return Int8Method(shape, self)


def bitsandbytes(quantization: Mapping[str, Any], unquantized: LinearFormat) -> LinearMethods:
    """Reads `load_in_8bit` or `load_in_4bit`; `llm_int8_skip_modules` are plain."""
    eight, four = (bool(quantization.get(f"load_in_{bits}bit", False)) for bits in (8, 4))
    if eight == four:
        raise UnsupportedModel(
            f"quantization_config: load_in_8bit is {eight} and load_in_4bit is {four}; one of them must be true"
        )
    form: LinearFormat = Int8("int8", scale_name="SCB", factor=1 / 127)
    if four:
        form = bitsandbytes_nf4(quantization, unquantized)
    ignored = paths_matching(quantization.get("llm_int8_skip_modules"), "llm_int8_skip_modules")
    return all_but([ignored], form, unquantized)
