"""Registers that a loop overwrites while matrix units may still read them, in code for compute capability 9.0.

A product there (`HGMMA`) may take one factor out of registers, and reads them while the program goes on, until a wait
says that it has ended. Triton 3.6 leaves products under way at the end of a loop's step and makes the next step's
factor in the same registers; ptxas notices that in some loops alone. Then results are wrong now and then.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;")
FROM_REGISTERS = re.compile(r"wgmma\.mma_async[^;{]*\{[^}]*\}\s*,\s*\{")
"""In PTX: sums and the first factor are lists of registers."""
FACTOR = 4
"""Registers of a thread that hold a factor of 64 x 16 numbers of two bytes."""


def overwritten(ptx: str, binary: bytes) -> list[str]:
    """What is wrong with a compiled kernel: an instruction that writes registers, and the product that reads them."""
    if not FROM_REGISTERS.search(ptx):
        return []
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    code = [(int(found[1], 16), found[2], found[3]) for found in map(INSTRUCTION.match, text.splitlines()) if found]
    assert code, "cuobjdump shows no instructions"
    index = {address: number for number, (address, _, _) in enumerate(code)}
    wrong: list[str] = []
    for last, (address, name, arguments) in enumerate(code):
        target = re.search(r"0x([0-9a-f]+)", arguments) if name.startswith("BRA") else None
        if target is not None and int(target[1], 16) < address:
            wrong += _of_loop(code[index[int(target[1], 16)] : last + 1])
    return wrong


def _of_loop(body: list[tuple[int, str, str]]) -> list[str]:
    """Of two turns."""
    wrong: list[str] = []
    reading: list[tuple[int, range]] = []
    for address, name, arguments in body * 2:
        first, *others = (argument.strip() for argument in arguments.split(","))
        if name.startswith("HGMMA"):
            factor = re.match(r"R(\d+)", others[0])
            reading.append((address, range(int(factor[1]), int(factor[1]) + FACTOR) if factor else range(0)))
        elif name.startswith("WARPGROUP.DEPBAR"):
            left = int(others[0], 16)
            reading = reading[len(reading) - left :] if left else []
        elif written := re.fullmatch(r"R(\d+)(\.\w+)*", first):
            start = int(written[1])
            count = 4 if ".128" in name or ".M88.4" in name else 2 if ".64" in name or ".WIDE" in name else 1
            wrong += [
                f"{name} {arguments} at {address:#x} while {product:#x} reads {registers}"
                for product, registers in reading
                if set(registers) & set(range(start, start + count))
            ]
    return wrong
