"""Checks an adapter's files in a separate process, which may safely run out of time or memory, or crash.

    check_files --two open files--> python -m kvern.adapters.check --> Checked | Refused

The process imports no torch and starts in a tenth of a second. Only it parses the files and evaluates the regular
expressions in them, which can run forever; the engine receives names, numbers and offsets.
"""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, BinaryIO, TypeVar

import msgspec

from kvern.adapters.names import MOST_SECONDS
from kvern.config import LARGEST_RANK
from kvern.errors import InvalidAdapter
from kvern.io.files import MEBIBYTE, read_at, reason
from kvern.models.header import Entry, read_entries

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


WEIGHTS_NAME = "adapter_model.safetensors"
MOST_CONFIG_BYTES = MEBIBYTE
MOST_HEADER_BYTES = 16 * MEBIBYTE
MOST_MEMORY_BYTES = 1 << 30
MOST_CPU_SECONDS = 4

_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})


class Matrix(msgspec.Struct, frozen=True):
    """A tensor of the weights file: `begin` is its first byte there."""

    dtype: str
    shape: tuple[int, int]
    begin: int


class AdaptedModule(msgspec.Struct, frozen=True):
    """One adapted module: its matrices by side, "A" and "B", whose product is multiplied by `scale`."""

    rank: int
    scale: float
    targeted: bool
    matrices: dict[str, Matrix]


class Checked(msgspec.Struct, frozen=True, tag=True):
    """The contents of valid files, by the names of the modules.

    `names` are the ends of the names that must be present (None: a regular expression selects them), except names that
    end with one of `excluded`, in `layers` (None: in all layers).
    """

    modules: dict[str, AdaptedModule]
    names: list[str] | None
    excluded: list[str]
    layers: list[int] | None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """`reason` begins with the name of the file."""

    reason: str


def check_files(folder: Path, config: BinaryIO, weights: BinaryIO) -> Checked:
    """Checks two open files in a separate process. Raises InvalidAdapter for bad files and failures of that process."""
    files = (config.fileno(), weights.fileno())
    command = [sys.executable, "-m", "kvern.adapters.check", *map(str, files)]
    try:
        done = subprocess.run(  # noqa: S603 (this module, and two numbers)
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=files,
            timeout=MOST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InvalidAdapter(f"{folder}: checking its files takes more than {MOST_SECONDS} seconds") from None
    except OSError as error:
        raise InvalidAdapter(f"{folder}: no process could be started to check its files: {reason(error)}") from None
    if done.returncode == -signal.SIGXCPU:
        raise InvalidAdapter(
            f"{folder}: checking its files takes more than {MOST_CPU_SECONDS} seconds of computing: simplify the "
            f"regular expressions of {CONFIG_NAME}, or list the names"
        )
    if done.returncode:
        raise InvalidAdapter(f"{folder}: the process that checked its files ended with {done.returncode}")
    answer = msgspec.msgpack.decode(done.stdout, type=Checked | Refused)
    if isinstance(answer, Refused):
        raise InvalidAdapter(f"{folder}/{answer.reason}")
    return answer


def check(config_file: BinaryIO, weights_file: BinaryIO) -> Checked:
    """Parses the files and evaluates their patterns. Raises InvalidAdapter; a bad pattern can make it run forever."""
    config = read_config(bytes(read_at(config_file, 0, os.fstat(config_file.fileno()).st_size)))
    try:
        data_begin, entries = read_entries(weights_file, MOST_HEADER_BYTES)
    except (OSError, ValueError) as error:
        raise InvalidAdapter(f"{WEIGHTS_NAME} cannot be read: {reason(error)}") from None
    if not entries:
        raise InvalidAdapter(f"{WEIGHTS_NAME} holds no tensor")
    sides: dict[str, dict[str, Matrix]] = {}
    for name, entry in entries.items():
        match = _TENSOR.fullmatch(name)
        if match is None or entry.dtype not in _FLOATS or len(entry.shape) != 2:
            raise InvalidAdapter(
                f"{WEIGHTS_NAME}: tensor {name} {list(entry.shape)} {entry.dtype} is no lora_A or lora_B weight; "
                "kvern knows no others"
            )
        sides.setdefault(match["module"], {})[match["side"]] = _matrix(entry, data_begin)
    modules = {name: _module(config, name, matrices) for name, matrices in sides.items()}
    names, excluded = config.listed or (None, [])
    return Checked(modules, names, excluded, config.layers)


def _matrix(entry: Entry, data_begin: int) -> Matrix:
    rows, columns = entry.shape
    return Matrix(entry.dtype, (rows, columns), data_begin + entry.data_offsets[0])


def _module(config: PeftConfig, name: str, matrices: dict[str, Matrix]) -> AdaptedModule:
    return AdaptedModule(config.rank(name), config.scale(name), config.targets(name), matrices)


def main(config: int, weights: int) -> None:
    """Answer about two open files on standard output, and give way to the engine meanwhile."""
    os.nice(10)
    for limit, most in ((resource.RLIMIT_AS, MOST_MEMORY_BYTES), (resource.RLIMIT_CPU, MOST_CPU_SECONDS)):
        with contextlib.suppress(ValueError, OSError):  # a system without this limit, or with a lower one
            resource.setrlimit(limit, (most, most + 1))
    answer: Checked | Refused
    try:
        with open(config, "rb", buffering=0) as config_file, open(weights, "rb", buffering=0) as weights_file:
            answer = check(config_file, weights_file)
    except InvalidAdapter as error:
        answer = Refused(str(error))
    except Exception as error:  # whatever a stranger's files make a library raise
        answer = Refused(f"{CONFIG_NAME} or {WEIGHTS_NAME} cannot be checked: {type(error).__name__}: {reason(error)}")
    sys.stdout.buffer.write(msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
