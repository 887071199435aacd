"""The formats of a model's weights: which `LinearMethod` each layer gets, by its path, and who registers formats.

A format is one file with a `LinearFormat` and a function. `linear_methods` finds the function by the `quant_method` of
the `quantization_config` in config.json: in `FORMATS`, by `LINEAR_METHODS.register`, or by an entry point of the group
`kvern.linear_methods`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from kvern.errors import ConfigError, KvernError, UnsupportedModel
from kvern.io.files import reason
from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_method import LinearMethod, LinearShape
from kvern.plugins import Plugins, imported
from kvern.spec.model import MoeSpec, Rename

if TYPE_CHECKING:
    from kvern.layers.experts import Experts


FORMATS = {
    "awq": "kvern.formats.awq:awq",
    "bitsandbytes": "kvern.formats.bitsandbytes:bitsandbytes",
    "compressed-tensors": "kvern.formats.compressed_tensors:compressed_tensors",
    "fbgemm_fp8": "kvern.formats.fp8:fbgemm_fp8",
    "fp8": "kvern.formats.fp8:fp8",
    "gguf": "kvern.formats.gguf.method:gguf",
    "gptq": "kvern.formats.gptq:gptq",
    "modelopt": "kvern.formats.modelopt:modelopt",
    "mxfp4": "kvern.formats.fp4:mxfp4",
    "torchao": "kvern.formats.torchao:torchao",
}
"""kvern's own formats by `quant_method`."""
ONLINE = "kvern.formats.online:made_online"
"""The formats of plain weights that are quantized while they are loaded."""
INT8_HEAD = "kvern.formats.online:with_int8_head"
"""The function that stores a plain output layer in INT8 while it is loaded."""


class LinearFormat(ABC):
    """Makes the methods of the layers whose weights are stored in one way."""

    joins = True
    """Parts that multiply the same rows, as queries, keys and values, are one matrix."""

    @abstractmethod
    def linear(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        """The method of a matrix that is multiplied."""

    def embedding(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        """The method of a matrix whose rows are also looked up."""
        return self.linear(shape, build)

    def table(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        """The method of a matrix whose rows are looked up, and that is never multiplied."""
        return self.embedding(shape, build)

    def experts(self, hidden_size: int, spec: MoeSpec, build: BuildOptions) -> "Experts | None":
        """The experts of a mixture in a class of this format's own; None: they are held by `LinearMethod`s."""
        return None

    def of_experts(self, hidden_size: int, spec: MoeSpec) -> "LinearFormat":
        """The format that makes the `LinearMethod`s of experts."""
        return self


FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)
"""The tensor in which some checkpoints store a part with others."""


@dataclass(frozen=True)
class LinearMethods:
    """The format of each layer: that of the first of `rules`, (regular expression, format), found in its path.

    Paths are those of a Llama-style checkpoint: "model.layers.3.mlp.down_proj", "model.layers.3.mlp.experts.down_proj"
    of all experts, "model.embed_tokens", "lm_head". Expressions are also searched for in other names that a layer may
    have: that of the tensor in which parts are fused, those of all experts and of the first, and the checkpoint's own,
    `names`, by Llama's. `renames` make of the names of a checkpoint's tensors, once they are Llama's, those that
    formats know.
    """

    default: LinearFormat
    rules: tuple[tuple[re.Pattern[str], LinearFormat], ...] = ()
    renames: tuple[Rename, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict, hash=False)

    def of(self, path: str) -> LinearFormat:
        """The format of the checkpoint's tensors of this path. Raises UnsupportedModel."""
        names = self._names(path)
        return next((item for pattern, item in self.rules if any(map(pattern.search, names))), self.default)

    def renamed(self, renames: tuple[Rename, ...]) -> "LinearMethods":
        """The formats of a checkpoint whose tensors have other names."""
        return replace(self, renames=renames)

    def _names(self, path: str) -> list[str]:
        parent, _, part = path.rpartition(".")
        names = [path]
        if part in FUSED:
            names.append(f"{parent}.{FUSED[part]}")
        if parent.endswith(".experts"):
            names += [parent, f"{parent}.0.{part}"]
        return names + [self.names[name] for name in names if name in self.names]


MakeMethods = Callable[[Mapping[str, Any], LinearFormat], LinearMethods]
"""`(quantization_config, the format of unquantized weights on this device) -> LinearMethods`."""

LINEAR_METHODS: Plugins[MakeMethods] = Plugins("linear method", "kvern.linear_methods", FORMATS)


def linear_methods(
    config: Mapping[str, Any], unquantized: LinearFormat, quantization: str | None = None
) -> LinearMethods:
    """The formats of the weights of a `config.json`'s model; `unquantized` is the format of plain weights.

    `quantization`: what plain weights are made while they are loaded, "fp8", "int8" or "int4"; None: nothing. Raises
    UnsupportedModel if the `quantization_config` is of no registered kind, or cannot be read as one; ConfigError if it
    is another than `quantization`.
    """
    stored = config.get("quantization_config")
    if not stored:
        if quantization is None:
            return LinearMethods(unquantized)
        return cast("LinearMethods", imported(ONLINE)(quantization, unquantized))
    name = stored.get("quant_method") if isinstance(stored, dict) else stored
    if quantization not in (None, name):
        raise ConfigError(
            f"quantization is {quantization}, but the model's weights are stored quantized by {str(name)[:60]!r}: "
            "leave quantization out"
        )
    make = LINEAR_METHODS.get(name) if isinstance(name, str) else None
    if make is None:
        raise UnsupportedModel(
            f"the model is quantized by {str(name)[:60]!r}; kvern loads float32, float16 and bfloat16 weights, and "
            f"what is registered: {', '.join(LINEAR_METHODS.names) or 'nothing yet'}"
        )
    try:
        return make(stored, unquantized)
    except KvernError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RecursionError, re.error) as error:
        raise UnsupportedModel(f"quantization_config cannot be read as {name!r:.60}: {reason(error)}") from error
