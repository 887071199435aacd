"""The instruction sets for CPU kernels: those of the processor, or those that KVERN_CPU_ISA names."""

import os
import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvern.errors import ConfigError

VARIABLE = "KVERN_CPU_ISA"


class Isa(NamedTuple):
    """An instruction set that includes the ones before it.

    name      its name in KVERN_CPU_ISA
    features  features that /proc/cpuinfo must name in addition
    flags     compiler flags
    """

    name: str
    features: frozenset[str]
    flags: tuple[str, ...]


_V4 = "-march=x86-64-v4"
_BF16 = (_V4, "-mavx512vnni", "-mavx512vbmi", "-mavx512bf16")
_AMX = (*_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8")
X86 = (
    Isa("scalar", frozenset(), ("-march=x86-64",)),
    Isa("avx2", frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}), ("-march=x86-64-v3",)),
    Isa("avx512", frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}), (_V4,)),
    Isa("avx512_vnni", frozenset({"avx512_vnni"}), (_V4, "-mavx512vnni")),
    Isa("avx512_bf16", frozenset({"avx512_bf16", "avx512vbmi"}), _BF16),
    Isa("amx", frozenset({"amx_bf16", "amx_int8", "amx_tile"}), _AMX),
)
"""The instruction sets of x86-64."""
ARM = (Isa("neon", frozenset(), ("-march=armv8-a",)),)
OTHERS = (Isa("scalar", frozenset(), ()),)
KNOWN = tuple(dict.fromkeys(isa.name for isa in (*X86, *ARM)))


def all_isas() -> tuple[Isa, ...]:
    """All instruction sets of this architecture, in ascending order."""
    return {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}.get(platform.machine().lower(), OTHERS)


def usable_isas() -> tuple[Isa, ...]:
    """The instruction sets that this processor has; the last one is the best."""
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
    """The instruction set that kernels use. Raises ConfigError."""
    return forced_isa() or usable_isas()[-1]


@cache
def features() -> frozenset[str]:
    """The processor's features by /proc/cpuinfo; empty without that file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())
