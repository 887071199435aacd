"""Which instructions kernels for a CPU use: those of the processor, or those that KVERN_CPU_ISA names."""

import os
import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvern.errors import ConfigError

VARIABLE = "KVERN_CPU_ISA"


class Isa(NamedTuple):
    """A set of instructions that includes those before it.

    name      as KVERN_CPU_ISA has it
    features  what /proc/cpuinfo has to name beside the features of those before
    flags     of a compiler
    """

    name: str
    features: frozenset[str]
    flags: tuple[str, ...]


_V4 = "-march=x86-64-v4"
_BF16 = (_V4, "-mavx512vnni", "-mavx512vbmi", "-mavx512bf16")
X86 = (
    Isa("scalar", frozenset(), ("-march=x86-64",)),
    Isa("avx2", frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}), ("-march=x86-64-v3",)),
    Isa("avx512", frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}), (_V4,)),
    Isa("avx512_vnni", frozenset({"avx512_vnni"}), (_V4, "-mavx512vnni")),
    Isa("avx512_bf16", frozenset({"avx512_bf16", "avx512vbmi"}), _BF16),
    Isa("amx", frozenset({"amx_bf16", "amx_tile"}), _BF16),
)
"""With `amx`, oneDNN multiplies plain bfloat16; kvern's kernels are those of `avx512_bf16`."""
ARM = (Isa("neon", frozenset(), ("-march=armv8-a",)),)
OTHERS = (Isa("scalar", frozenset(), ()),)
KNOWN = tuple(dict.fromkeys(isa.name for isa in (*X86, *ARM)))


def all_isas() -> tuple[Isa, ...]:
    """Of processors of this kind, each with those before it."""
    return {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}.get(platform.machine().lower(), OTHERS)


def usable_isas() -> tuple[Isa, ...]:
    """Those that this processor has; the last one is all that it can do."""
    found: list[Isa] = []
    for isa in all_isas():
        if not isa.features <= features():
            break
        found.append(isa)
    return tuple(found)


def forced_isa() -> Isa | None:
    """The one that KVERN_CPU_ISA names; None: it is not set. Raises ConfigError if this processor lacks it."""
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    usable = {isa.name: isa for isa in usable_isas()}
    if name not in usable:
        what = "this processor does not have it" if name in KNOWN else "there is no such set of instructions"
        raise ConfigError(
            f"{VARIABLE} is {name[:40]!r}: {what}; choose one of {', '.join(usable)}, or leave it unset for all that "
            "the processor can do"
        )
    return usable[name]


def chosen_isa() -> Isa:
    """What kernels use. Raises ConfigError."""
    return forced_isa() or usable_isas()[-1]


@cache
def features() -> frozenset[str]:
    """What /proc/cpuinfo says that the processor can do; nothing where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())
