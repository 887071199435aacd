"""Checks an adapter's files in a separate process, which may safely run out of time or memory, or crash.

    check_files --two open files--> python -m kvern.adapters.check --> Checked | Refused

The process imports no torch and starts in a tenth of a second. Only it parses the files and evaluates the regular
expressions in them; the engine receives names, numbers and offsets.
"""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvern.adapters.peft_config import CONFIG_NAME, PeftConfig, read_config
from kvern.errors import InvalidAdapter
from kvern.io.files import MEBIBYTE, read_at, reason
from kvern.models.header import Entry, read_entries

WEIGHTS_NAME = "adapter_model.safetensors"
MOST_CONFIG_BYTES = MEBIBYTE
MOST_HEADER_BYTES = 16 * MEBIBYTE
MOST_MEMORY_BYTES = 1 << 30
MOST_CPU_SECONDS = 4
MOST_SECONDS = 30
"""The longest time for a check, also on a slow disk."""

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
