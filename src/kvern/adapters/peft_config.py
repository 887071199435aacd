"""The settings of adapter_config.json that change the result.

Its regular expressions are untrusted and can run forever: only the process of `kvern.adapters.check` evaluates them.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, TypeVar

import msgspec

from kvern.config import LARGEST_RANK
from kvern.errors import InvalidAdapter
from kvern.io.files import reason

CONFIG_NAME = "adapter_config.json"
REFUSED = (
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
"""Settings that need more than two matrices for a linear layer; so do all `use_...` settings except `use_rslora`."""
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Accepted values of `init_lora_weights`; the others change the weights of the base model too."""

Rank = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_RANK)]
LayerIndex = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
Number = TypeVar("Number", int, float)


class PeftConfig(msgspec.Struct, frozen=True):
    """The fields of adapter_config.json that kvern reads."""

    r: Rank
    lora_alpha: float
    target_modules: str | list[str]
    exclude_modules: str | list[str] | None = None
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool | None = None
    layers_to_transform: LayerIndex | list[LayerIndex] | None = None

    def rank(self, module: str) -> int:
        """The rank of the module's two matrices."""
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """The factor for the product of the module's matrices."""
        rank = self.rank(module)
        alpha = _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (rank**0.5 if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """True if PEFT adapts this module."""
        if self.exclude_modules and _names(self.exclude_modules, module):
            return False
        return self.target_modules == "all-linear" or _names(self.target_modules, module)

    @property
    def listed(self) -> tuple[list[str], list[str]] | None:
        """The ends of the names of modules that must be adapted, and of those that must not.

        None if a regular expression selects them.
        """
        left_out = self.exclude_modules or []
        if isinstance(self.target_modules, str) or isinstance(left_out, str):
            return None
        return self.target_modules, left_out

    @property
    def layers(self) -> list[int] | None:
        """The layers that were chosen; None: all."""
        chosen = self.layers_to_transform
        return [chosen] if isinstance(chosen, int) else chosen


def _names(names: str | list[str], module: str) -> bool:
    """True if `names`, a list of ends or a regular expression of the whole name, match the module."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return ends_with_any(module, frozenset(names))


def ends_with_any(module: str, names: frozenset[str]) -> bool:
    """True if one of `names` is the module's name or its end after a dot."""
    parts = module.split(".")
    return any(".".join(parts[first:]) in names for first in range(len(parts)))


def read_config(text: bytes) -> PeftConfig:
    """Check the content of an adapter_config.json. Raises InvalidAdapter."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidAdapter(f"{CONFIG_NAME} is not JSON: {reason(error)}") from None
    if not isinstance(values, dict):
        raise InvalidAdapter(f"{CONFIG_NAME} holds a JSON {type(values).__name__}, not an object")
    kind = values.get("peft_type")
    if kind != "LORA":
        raise InvalidAdapter(f"{CONFIG_NAME}: peft_type is {kind!r:.60}; kvern knows LORA alone")
    if values.get("bias", "none") != "none":
        raise InvalidAdapter(
            f"{CONFIG_NAME}: bias is {values['bias']!r:.60}; kvern adapts no biases: train with bias none"
        )
    for name in values:
        if values[name] and (name in REFUSED or (name.startswith("use_") and name != "use_rslora")):
            raise InvalidAdapter(f"{CONFIG_NAME}: {name} is {values[name]!r:.60}; kvern does not do that")
    start = values.get("init_lora_weights", True)
    if start not in PLAIN_STARTS:
        raise InvalidAdapter(
            f"{CONFIG_NAME}: init_lora_weights is {start!r:.60}, which changes the base model too: "
            "convert it when saving"
        )
    try:
        config = msgspec.convert(values, PeftConfig)
    except msgspec.ValidationError as error:
        raise InvalidAdapter(f"{CONFIG_NAME}: {reason(error).replace('`', '')}") from None
    whole = [names for names in (config.target_modules, config.exclude_modules) if isinstance(names, str)]
    _check_patterns((*(config.rank_pattern or ()), *(config.alpha_pattern or ()), *whole))
    return config


def _check_patterns(patterns: Iterable[str]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidAdapter(
                f"{CONFIG_NAME}: {pattern!r:.100} is not a regular expression: {reason(error)}"
            ) from None


def _by_pattern(patterns: Mapping[str, Number] | None, module: str, default: Number) -> Number:
    """The value of the first pattern that the end of the module's name matches, as PEFT looks it up."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
