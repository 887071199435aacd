"""The report of ``kvern models MODEL``: precision of a model, its memory, and whether it fits on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table

from kvern.cli.output import make_table, print_lines, print_tables
from kvern.config import EngineConfig
from kvern.cpu.cores import available_memory
from kvern.io.files import as_size
from kvern.models.loader import outline_model
from kvern.models.precision import Share, WeightStatistics, shares
from kvern.quantize.checkpoint import part_without_calibration
from kvern.runner.memory import (
    GIGABYTE,
    GPU_MEMORY_SHARE,
    MARGIN_BYTES,
    bytes_of_state,
    bytes_of_token,
    choose_groups,
    host_cache_bytes,
)
from kvern.runner.plan import (
    REQUIRED_KERNELS,
    FreeMemory,
    Plan,
    ProbedDevice,
    agree,
    longest_fitting,
    running_requests,
    sequences_taken,
    states_of_a_request,
)
from kvern.spec.model import ModelSpec

EIGHT_BIT = "int8"
DEFAULTS = EngineConfig()
SMALLER = {"fp8": 8.0, "int4": 4.125}
"""Bits per weight of the methods of `kvern quantize`, scales included."""
STREAMS = 64
"""The number of concurrent sequences whose memory is reported."""
STREAM_TOKENS = 8192
KEPT = ("embeddings", "output layer", "routers", "norms, biases")
"""Kinds of layers that quantizing leaves as they are."""


@dataclass(frozen=True)
class Device:
    """A device that a model could run on, with its free bytes."""

    name: str
    free: int
    host: bool = False

    def room(self, spec: ModelSpec, dtype: str, weights: int) -> tuple[FreeMemory, Plan]:
        """Returns the room for keys, values and states beside the weights, if all of kvern's kernels work.

        The room has no bytes if not even the weights fit. `dtype` is the model's.
        """
        kernels = frozenset() if self.host else REQUIRED_KERNELS | {"windows"}
        plan = agree([ProbedDevice("cpu" if self.host else "cuda", dtype, kernels)], DEFAULTS, spec)
        groups = choose_groups(DEFAULTS, spec, plan)
        token_bytes = bytes_of_token(spec, getattr(torch, plan.cache_dtype), groups)
        state_bytes, left = bytes_of_state(spec, getattr(torch, dtype)), max(self.free - weights, 0)
        gpu_bytes = max(int((left - MARGIN_BYTES) * GPU_MEMORY_SHARE), 0)
        cache = host_cache_bytes(left, token_bytes, state_bytes) if self.host else gpu_bytes
        window = groups.window or 0
        tables = groups.window_tables
        whole = groups.whole
        room = FreeMemory(cache, token_bytes, state_bytes=state_bytes, window=window, window_tables=tables, whole=whole)
        return room, plan


@dataclass(frozen=True)
class ModelReport:
    """The figures of one model; `dtype` is the name of its number format."""

    model: str
    folder: Path
    spec: ModelSpec
    dtype: str
    shares: list[Share]
    devices: list[Device]

    @property
    def context(self) -> int:
        """The number of positions of the model."""
        return self.spec.max_position_embeddings

    @property
    def takes_quantize(self) -> bool:
        """True if `kvern quantize` supports the model's layers."""
        return part_without_calibration(self.spec) is None

    @property
    def parameters(self) -> int:
        return sum(share.parameters for share in self.shares)

    @property
    def weight_bytes(self) -> int:
        return sum(share.nbytes for share in self.shares)

    def smaller(self) -> dict[str, int]:
        """Estimates the bytes of a plain model's weights after quantizing with other methods."""
        if not self.takes_quantize or any("float" not in share.format for share in self.shares):
            return {}
        layers = [share for share in self.shares if share.kind not in KEPT]
        rest = self.weight_bytes - sum(share.nbytes for share in layers)
        return {
            method: rest + int(bits / 8 * sum(share.parameters for share in layers)) for method, bits in SMALLER.items()
        }

    def token_bytes(self, dtype: str) -> int:
        """Returns the bytes of keys and values of one token in all layers, in this dtype."""
        return bytes_of_token(self.spec, getattr(torch, dtype))

    def context_bytes(self, dtype: str) -> int:
        """Returns those of a sequence as long as the context; layers with a window may keep less of it."""
        return self._cache_bytes(dtype, 1, self.context)

    def streams_bytes(self, dtype: str) -> int:
        """Returns those of STREAMS sequences of `stream_tokens`, of which one is in its prefill and the others
        decode."""
        return self._cache_bytes(dtype, STREAMS, self.stream_tokens)

    @property
    def stream_tokens(self) -> int:
        return min(STREAM_TOKENS, self.context)

    def _cache_bytes(self, dtype: str, count: int, length: int) -> int:
        room, plan = Device("CPU", 0, host=True).room(self.spec, self.dtype, 0)
        tokens = sequences_taken(count, length, room, plan, DEFAULTS)
        given, wanted = (int(getattr(torch, name).itemsize) for name in (plan.cache_dtype, dtype))
        return tokens * room.token_bytes * wanted // given

    def cache_tokens(self, device: Device, weights: int) -> int:
        """Returns the longest sequence that fits beside so many bytes of weights; 0 if not even the weights fit."""
        room, plan = device.room(self.spec, self.dtype, weights)
        states = running_requests([room], plan, DEFAULTS) * states_of_a_request(DEFAULTS)
        left = max(room.cache_bytes - states * room.state_bytes, 0)
        return longest_fitting(left // room.token_bytes, room, plan, DEFAULTS)

    def verdict(self, device: Device) -> str:
        """Returns in one line whether the model fits."""
        tokens, weights = self.cache_tokens(device, self.weight_bytes), self.weight_bytes
        free = f"{device.free / GIGABYTE:.1f} GB free"
        if tokens <= 0:
            fitting = [name for name, size in self.smaller().items() if self.cache_tokens(device, size) > 0]
            hint = f"; it would by kvern quantize --method {fitting[0]}" if fitting else ""
            return f"does not fit: its weights take {weights / GIGABYTE:.1f} GB of {free}{hint}"
        if tokens < self.context:
            return (
                f"fits with sequences of up to {tokens:,} tokens: {free} hold weights of {weights / GIGABYTE:.1f} GB "
                f"and so many keys and values, not the whole context of {self.context:,}"
            )
        return (
            f"fits: {free} hold the weights and keys and values of a sequence of {tokens:,} tokens, the context is "
            f"{self.context:,}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "folder": str(self.folder),
            "parameters": self.parameters,
            "weight_bytes": self.weight_bytes,
            "bits_per_weight": 8 * self.weight_bytes / self.parameters,
            "layers": [asdict(share) | {"bits_per_weight": share.bits} for share in self.shares],
            "context": self.context,
            "kv_cache": {
                "dtype": self.dtype,
                "token_bytes": self.token_bytes(self.dtype),
                "context_bytes": self.context_bytes(self.dtype),
                "streams": STREAMS,
                "stream_tokens": self.stream_tokens,
                "streams_bytes": self.streams_bytes(self.dtype),
                "token_bytes_8bit": None if self.spec.attends_to_latents else self.token_bytes(EIGHT_BIT),
                "context_bytes_8bit": None if self.spec.attends_to_latents else self.context_bytes(EIGHT_BIT),
            },
            "smaller": self.smaller(),
            "devices": [
                {
                    "device": device.name,
                    "free_bytes": device.free,
                    "fits": self.cache_tokens(device, self.weight_bytes) > 0,
                    "cache_tokens": self.cache_tokens(device, self.weight_bytes),
                    "verdict": self.verdict(device),
                }
                for device in self.devices
            ],
        }

    def print(self) -> None:
        """Prints two tables, and a verdict for each device."""
        streams = f"{STREAMS} of {self.stream_tokens:,}"
        memory = make_table("keys and values", "per token", f"context of {self.context:,}", "with the weights", streams)
        for dtype in [self.dtype] if self.spec.attends_to_latents else [self.dtype, EIGHT_BIT]:
            cache, name = self.context_bytes(dtype), "8 bits" if dtype == EIGHT_BIT else dtype
            sizes = self.token_bytes(dtype), cache, cache + self.weight_bytes, self.streams_bytes(dtype)
            memory.add_row(name, *map(as_size, sizes))
        print_tables(_precision_table(self), memory)
        print_lines(
            *(
                f"kvern quantize --method {method} would make about {as_size(size)} of the weights"
                for method, size in self.smaller().items()
            ),
            *(f"{device.name}: {self.verdict(device)}" for device in self.devices),
        )


def _precision_table(report: ModelReport) -> Table:
    title = f"{report.model}: {report.parameters:,} parameters, {as_size(report.weight_bytes)}"
    table = make_table("layers", "format", "parameters", "share", "bits", "size", title=title)
    before = ""
    for share in report.shares:
        table.add_row(
            share.kind if share.kind != before else "",
            share.format,
            f"{share.parameters:,}",
            f"{share.parameters / report.parameters:.1%}",
            f"{share.bits:.2f}",
            as_size(share.nbytes),
        )
        before = share.kind
    table.add_section()
    bits = 8 * report.weight_bytes / report.parameters
    table.add_row("all", "", f"{report.parameters:,}", "100.0%", f"{bits:.2f}", as_size(report.weight_bytes))
    return table


def print_statistics(matrices: Sequence[WeightStatistics]) -> None:
    """Prints a row for each matrix."""
    table = make_table("matrix", "weights", "spread", "scales", "saturated")
    for item in matrices:
        scales = "" if item.smallest_scale is None else f"{item.smallest_scale:.2g} to {item.largest_scale:.2g}"
        table.add_row(
            item.layer.removeprefix("layers."),
            f"{item.least:.3g} to {item.largest:.3g}",
            f"{item.deviation:.3g}",
            scales,
            "" if item.saturated is None else f"{item.saturated:.2%}",
        )
    print_tables(table)


def devices() -> Iterator[Device]:
    """Yields the GPUs of this machine that kvern can use, and the CPU."""
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield Device(torch.cuda.get_device_name(index), torch.cuda.mem_get_info(index)[0])
    yield Device("CPU", available_memory(), host=True)


def report_of(model: str, folder: Path, load_format: Literal["auto", "dummy"] = "auto") -> ModelReport:
    """Reads the headers of a model's files; "dummy" reads only its configuration. Raises KvernError."""
    decoder = outline_model(folder, load_format=load_format)
    return ModelReport(
        model=model,
        folder=folder,
        spec=decoder.spec,
        dtype=str(decoder.build.dtype).removeprefix("torch."),
        shares=shares(decoder),
        devices=list(devices()),
    )
