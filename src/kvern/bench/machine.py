"""Versions of the software and the hardware of this machine, for records of benchmarks."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

import msgspec

from kvern.version import __version__

ROOT = Path(__file__).parents[3]
"""The folder of a checkout, if kvern runs from one."""


class Software(msgspec.Struct, frozen=True, kw_only=True):
    """Versions; `commit` ends in -dirty where the checkout had changes, and is null where kvern is installed."""

    kvern: str | None
    commit: str | None = None
    python: str | None
    torch: str | None
    cuda: str | None = None
    triton: str | None = None


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """A machine: its processor, the cores that the process may use, its memory, and its GPUs with their driver."""

    processor: str | None
    cores: int | None
    memory_bytes: int | None = None
    gpus: list[str] = []
    driver: str | None = None


def software() -> Software:
    """Returns the versions that run here. CUDA's is known where PyTorch is loaded."""
    torch = sys.modules.get("torch")
    return Software(
        kvern=__version__,
        commit=_commit(),
        python=platform.python_version(),
        torch=str(torch.__version__) if torch else _version("torch"),
        cuda=torch.version.cuda if torch else None,
        triton=_version("triton"),
    )


def hardware() -> Hardware:
    """Returns what this machine has."""
    gpus, driver = _gpus()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Hardware(processor=_processor(), cores=cores, memory_bytes=_memory_bytes(), gpus=gpus, driver=driver)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that kvern runs from; None if there is none, or no git."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _processor() -> str | None:
    """The processor's name, as the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, None) or platform.processor() or platform.machine() or None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # another system's
        return None


def _gpus() -> tuple[list[str], str | None]:
    """The names of the GPUs, and the version of their driver; none where there is no driver of NVIDIA."""
    try:
        import pynvml
    except ImportError:  # installed on Linux alone
        return [], None
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles], str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return [], None
