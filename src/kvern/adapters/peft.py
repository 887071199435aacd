"""Reads LoRA adapters in PEFT's format: adapter_config.json beside adapter_model.safetensors.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight     [rank, inputs]
    `--- PEFT's ---' `------ the module, as in the checkpoint ------'  and lora_B [outputs, rank]

Modules are mapped to the decoder's layers as the tensors of a checkpoint are. Whatever would be read wrongly, or only
in part, is refused by its name.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from torch import Tensor

from kvern.adapters.targets import Target
from kvern.config import LARGEST_RANK
from kvern.errors import CorruptCheckpoint, InvalidAdapter
from kvern.models.checkpoint import StoredTensor, open_map, read_header
from kvern.models.loader import llama_name
from kvern.models.spec import ModelSpec, Rename

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_EXPERTS = re.compile(r"\.(experts|block_sparse_moe|router)\b|\.mlp\.gate$")
_ENDS = re.compile(r"(^|\.)(lm_head|embed_tokens|embed_in|embed_out|wte)$")
REFUSED = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
)
"""Settings that mean more than two matrices beside a linear layer."""
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Of `init_lora_weights`: other ways to begin change the model's own weights as well."""


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one linear part: `up @ (down @ x)`, its scale within `up`.

    `down [rank, inputs]`, `up [outputs, rank]`, in the model's dtype.
    """

    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        return self.down.shape[0]


Adapter = Mapping[str, LowRank]
"""By the decoder's linear parts, such as "layers.3.self_attn.qkv_proj/q_proj"; see `Target`."""


Rank = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_RANK)]


class _Config(msgspec.Struct, frozen=True):
    """What of adapter_config.json decides what is computed."""

    r: Rank
    lora_alpha: float
    target_modules: str | list[str]
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool | None = None
    layers_to_transform: int | list[int] | None = None

    def rank(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        rank = self.rank(module)
        alpha = _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (rank**0.5 if self.use_rslora else rank)

    def transforms(self, module: str) -> bool:
        """Whether the module's layer is among those that were chosen."""
        layers, layer = self.layers_to_transform, re.search(r"\.layers\.(\d+)\.", module)
        if layers is None or layer is None:
            return True
        return int(layer[1]) in ([layers] if isinstance(layers, int) else layers)

    def targets(self, module: str) -> bool:
        """Whether PEFT would have adapted this module."""
        if isinstance(self.target_modules, str):
            return self.target_modules == "all-linear" or re.fullmatch(self.target_modules, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in self.target_modules)


def read_adapter(
    folder: Path, spec: ModelSpec, targets: Mapping[str, tuple[Target, ...]], max_rank: int, dtype: torch.dtype
) -> Adapter:
    """Read and check the adapter in a folder: every tensor, by the shapes of the decoder's `targets`.

    Raises InvalidAdapter, which names the file and what in it is wrong.
    """
    config = _read_config(folder / CONFIG_NAME)
    file = folder / WEIGHTS_NAME
    try:
        if not file.is_file():
            raise InvalidAdapter(f"{file} does not exist: an adapter's weights are read from that file alone")
        pairs: dict[str, dict[str, Tensor]] = {}
        data = open_map(file)
        for stored in read_header(file):
            match = _TENSOR.fullmatch(stored.name)
            if match is None or not stored.dtype.is_floating_point or len(stored.shape) != 2:
                shape = f"{list(stored.shape)} {str(stored.dtype).removeprefix('torch.')}"
                raise InvalidAdapter(
                    f"{file}: tensor {stored.name} {shape} is no lora_A or lora_B weight; kvern knows no others"
                )
            pairs.setdefault(match["module"], {})[match["side"]] = _read(stored, data)
    except (CorruptCheckpoint, OSError, ValueError) as error:
        raise InvalidAdapter(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not pairs:
        raise InvalidAdapter(f"{file} holds no tensor")
    adapter: dict[str, LowRank] = {}
    for module, pair in pairs.items():
        parts = _low_ranks(file, config, module, pair, spec, targets, max_rank, dtype)
        if parts.keys() & adapter.keys():
            raise InvalidAdapter(f"{file}: {module} is there twice, fused with others and alone")
        adapter |= parts
    _check_complete(file, config, adapter, targets)
    return adapter


def _read(stored: StoredTensor, data: Any) -> Tensor:
    [(_, rows)] = stored.runs(data, whole=True)
    return rows.to(torch.float32, copy=True)  # the file may change, or go


def _low_ranks(
    file: Path,
    config: _Config,
    module: str,
    pair: Mapping[str, Tensor],
    spec: ModelSpec,
    targets: Mapping[str, tuple[Target, ...]],
    max_rank: int,
    dtype: torch.dtype,
) -> dict[str, LowRank]:
    """The parts of the decoder that one adapted module of the checkpoint stands for."""
    missing = {"A", "B"} - pair.keys()
    if missing:
        raise InvalidAdapter(f"{file}: tensor {module}.lora_{missing.pop()}.weight is missing beside its counterpart")
    name, rename = llama_name(f"{module}.weight", spec.renames)
    parts = targets.get(name.removesuffix(".weight"))
    if parts is None:
        raise InvalidAdapter(f"{file}: {module} {_why_not(module)}")
    if not config.targets(module):
        raise InvalidAdapter(f"{file}: {module} has tensors, but target_modules does not name it")
    down, up, rank = pair["A"], pair["B"], config.rank(module)
    inputs, outputs = parts[0].inputs, sum(part.outputs for part in parts)
    for side, tensor, expected in (("A", down, (rank, inputs)), ("B", up, (outputs, rank))):
        if tuple(tensor.shape) != expected:
            raise InvalidAdapter(
                f"{file}: tensor {module}.lora_{side}.weight is {list(tensor.shape)}, and rank {rank} of its "
                f"configuration and the model's layer of {inputs} inputs and {outputs} outputs ask for "
                f"{list(expected)}: is it of another base model?"
            )
    if rank > max_rank:
        raise InvalidAdapter(f"{file}: {module} has rank {rank}, above max_adapter_rank {max_rank}: raise that")
    down, up = down.to(dtype), (_reordered(up, rename, spec) * config.scale(module)).to(dtype)
    for side, tensor in (("A", down), ("B", up)):
        if not tensor.isfinite().all():
            raise InvalidAdapter(
                f"{file}: tensor {module}.lora_{side}.weight, scaled by {config.scale(module):g}, holds numbers that "
                f"are not finite in {str(dtype).removeprefix('torch.')}"
            )
    each = torch.split(up, [part.outputs for part in parts])
    return {part.key: LowRank(down, rows.contiguous()) for part, rows in zip(parts, each, strict=True)}


def _reordered(up: Tensor, rename: Rename | None, spec: ModelSpec) -> Tensor:
    """The rows as the decoder has them, where it reorders those of the checkpoint's weight."""
    return up if rename is None or rename.transform is None else rename.transform(up, spec)


def _why_not(module: str) -> str:
    if _EXPERTS.search(module):
        return "is of experts or their router, which kvern does not adapt: train without them"
    if _ENDS.search(module):
        return "is an embedding or the output layer, which kvern does not adapt: train without it"
    return "is no linear layer of this model: is it of another base model?"


def _check_complete(file: Path, config: _Config, adapter: Adapter, targets: Mapping[str, tuple[Target, ...]]) -> None:
    """A listed module that the decoder knows by this name must be there in every layer."""
    if isinstance(config.target_modules, str):
        return
    known = {name.rpartition(".")[2] for name, parts in targets.items() if any(part.key in adapter for part in parts)}
    for name, parts in targets.items():
        absent = any(part.key not in adapter for part in parts)
        if absent and config.transforms(name) and name.rpartition(".")[2] in known and config.targets(name):
            raise InvalidAdapter(f"{file}: tensor {name}.lora_A.weight is missing, which target_modules asks for")


def _read_config(file: Path) -> _Config:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidAdapter(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidAdapter(f"{file} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidAdapter(f"{file} holds a JSON {type(values).__name__}, not an object")
    kind = values.get("peft_type")
    if kind != "LORA":
        raise InvalidAdapter(f"{file}: peft_type is {kind!r:.60}; kvern knows LORA alone")
    if values.get("bias", "none") != "none":
        raise InvalidAdapter(f"{file}: bias is {values['bias']!r:.60}; kvern adapts no biases: train with bias none")
    for name in REFUSED:
        if values.get(name):
            raise InvalidAdapter(f"{file}: {name} is {values[name]!r:.60}; kvern does not do that")
    start = values.get("init_lora_weights", True)
    if start not in PLAIN_STARTS:
        raise InvalidAdapter(
            f"{file}: init_lora_weights is {start!r:.60}, which changes the base model too: convert it when saving"
        )
    try:
        config = msgspec.convert(values, _Config)
    except msgspec.ValidationError as error:
        raise InvalidAdapter(f"{file}: {str(error).replace('`', '')}") from error
    whole = [config.target_modules] if isinstance(config.target_modules, str) else []
    for expression in (*(config.rank_pattern or ()), *(config.alpha_pattern or ()), *whole):
        try:
            re.compile(expression)
        except re.error as error:
            raise InvalidAdapter(f"{file}: {expression!r:.100} is not a regular expression: {error}") from error
    return config


Number = TypeVar("Number", int, float)


def _by_pattern(patterns: Mapping[str, Number] | None, module: str, default: Number) -> Number:
    """The value of the first pattern that the end of the module's name matches, as PEFT looks it up."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
