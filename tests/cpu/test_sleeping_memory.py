"""Memory that a process gives back keeps its addresses and gets its contents again, whatever holds it."""

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import gc, mmap, os, resource, sys, threading
from pathlib import Path
import torch
from kvern.cpu import large_pages
from kvern.cpu.asleep import SleepingMemory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

folder, size = Path(sys.argv[1]), 24 << 20
weight = large_pages.empty((size,), torch.uint8).random_()
plain = torch.randint(0, 255, (size,), dtype=torch.uint8)
other = torch.randn(512, 512).to_mkldnn()
cache = large_pages.zeros((size,), torch.uint8).fill_(7)
(folder / "file").write_bytes(bytes(weight.numpy()))
mapped = torch.from_file(str(folder / "file"), shared=True, size=size, dtype=torch.uint8)
tensors = weight, plain, mapped
gc.freeze()
later = torch.randint(0, 255, (size,), dtype=torch.uint8)
expected = [tensor.clone() for tensor in (*tensors, later, other.to_dense())]

def check():
    for tensor, wanted in zip((*tensors, later, other.to_dense()), expected, strict=True):
        assert torch.equal(tensor, wanted)
"""
GIVEN_BACK = """
memory = SleepingMemory(folder, [cache[5:]])
addresses = [tensor.data_ptr() for tensor in tensors]
for change in range(3):
    before = resident()
    memory.leave()
    assert resident() < before - 2.9 * size + (size if change else 0), (before, resident())
    assert not any(tensor[mmap.PAGESIZE : -mmap.PAGESIZE].any() for tensor in (weight, plain, cache))
    memory.enter()
    check()
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    plain[3 * change : 3 << 20] = change
    expected[1][3 * change : 3 << 20] = change
assert [path.name for path in folder.iterdir()] == ["file"], "nothing is left behind"
"""
NO_SPACE = """
memory = SleepingMemory(folder, [cache])
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    memory.leave()
except OSError as error:
    assert "too large" in str(error), error
else:
    raise AssertionError("there was no place for it")
check()
assert cache.all(), "nothing was given back"
"""


def run(script: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_memory_that_was_given_back_returns_as_it_was_and_caches_are_empty(tmp_path: Path) -> None:
    run(GIVEN_BACK, tmp_path)


@pytest.mark.nightly
def test_nothing_is_given_back_that_the_file_cannot_hold(tmp_path: Path) -> None:
    run(NO_SPACE, tmp_path)
