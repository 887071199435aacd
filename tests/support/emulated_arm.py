"""Kernels for ARM in an emulator, called as the library of this process is: its tests compare them with PyTorch."""

import ctypes
import os
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kvern.cpu.kernel_library import FLAGS, SOURCES
from kvern.cpu.library import NUMBER
from kvern.cpu.processor import ARM

COMPILER = "aarch64-linux-gnu-g++"
SYSTEM = Path("/usr/aarch64-linux-gnu")
DRIVER = Path(__file__).parents[1] / "cpu" / "emulated.cpp"
PAGE = 4096
ENDED, FETCH, CHANGED = range(3)


def build(target: Path, sources: Sequence[str], *flags: str) -> Path:
    """Compile kernels of these sources with what calls them. Raises CalledProcessError with what the compiler said."""
    [neon] = ARM
    files = [*(str(SOURCES / name) for name in sources), str(DRIVER)]
    command = [COMPILER, *FLAGS, *flags, *neon.flags, f"-I{SOURCES}", "-rdynamic", "-pthread", *files, "-ldl"]
    subprocess.run([*command, "-o", str(target)], check=True, capture_output=True, text=True)
    return target


class EmulatedLibrary:
    """Stands for a `ctypes.CDLL`: calls are made in an emulator, on the memory of this process."""

    _name = "emulated"
    sources: Sequence[str] = ()

    def __init__(self, emulator: str, program: Path) -> None:
        asked, self._asks = os.pipe()
        self._answers, answering = os.pipe()
        command = [emulator, "-L", str(SYSTEM), str(program), str(asked), str(answering)]
        self._process = subprocess.Popen(command, pass_fds=(asked, answering), stderr=subprocess.PIPE, text=True)
        os.close(asked)
        os.close(answering)
        self._memory = os.open("/proc/self/mem", os.O_RDWR)
        self.calls: list[str] = []

    def __enter__(self) -> "EmulatedLibrary":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for descriptor in (self._asks, self._answers, self._memory):
            os.close(descriptor)
        self._process.communicate(timeout=60)

    def __getattr__(self, name: str) -> "EmulatedFunction":
        if not name.startswith("kvern_"):
            raise AttributeError(name)
        return EmulatedFunction(self, name)

    def call(self, name: str, numbers: Sequence[int], floats: Sequence[float]) -> None:
        """Call a kernel, and give it the pages that it asks for. Raises RuntimeError if the emulator ended."""
        self.calls.append(name)
        given = struct.pack("8f", *floats, *[0.0] * (8 - len(floats)))
        said = (
            struct.pack("q", len(name))
            + name.encode()
            + given
            + struct.pack(f"{len(numbers) + 1}q", len(numbers), *numbers)
        )
        os.write(self._asks, said)
        while (kind := self._read(1)[0]) != ENDED:
            [at] = self._read(1)
            if kind == FETCH:
                try:
                    page = os.pread(self._memory, PAGE, at)
                except OSError:
                    page = b""
                os.write(self._asks, struct.pack("q", len(page) == PAGE) + page)
            else:
                [length] = self._read(1)
                os.pwrite(self._memory, self._bytes(length), at)

    def _read(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"{count}q", self._bytes(8 * count))

    def _bytes(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            some = os.read(self._answers, count - len(found))
            if not some:
                raise RuntimeError(f"the emulator ended: {self._process.communicate()[1]}")
            found += some
        return found


class EmulatedFunction:
    """A function of an `EmulatedLibrary`, with the types of its arguments, if they were set."""

    argtypes: Sequence[Any] = ()
    restype: Any = None

    def __init__(self, library: EmulatedLibrary, name: str) -> None:
        self._library, self._name = library, name

    def __call__(self, *given: Any) -> None:
        kinds = self.argtypes or [None] * len(given)
        floats = [value for kind, value in zip(kinds, given, strict=True) if kind is NUMBER]
        numbers = [_number(value) for kind, value in zip(kinds, given, strict=True) if kind is not NUMBER]
        self._library.call(self._name, numbers, floats)


def _number(value: Any) -> int:
    """An argument as a register has it."""
    if isinstance(value, ctypes.Structure | ctypes.Array):
        return ctypes.addressof(value)
    return 0 if value is None else int(value)
