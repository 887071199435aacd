"""What a GPU's engine has moves to memory that can be given back, and comes back with its contents: on the host's."""

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from kvern.device import pinned
from kvern.runner import device_asleep
from kvern.runner.device_asleep import LEAST_FREE, DeviceMemoryAsleep
from tests.support.host_cuda import HostMapped, have_cuda_on_the_host
from tests.support.sleeping import MIB, Owner

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    have_cuda_on_the_host(monkeypatch)
    yield
    gc.collect()  # what is pinned is let go


def test_contents_come_back_whatever_has_changed() -> None:
    owner = Owner(CPU)
    first = [tensor.clone() for tensor in owner.tensors]
    memory = DeviceMemoryAsleep(owner, CPU, [owner.cache])
    addresses = [tensor.data_ptr() for tensor in owner.tensors]
    for tensor, wanted in zip(owner.kept, first, strict=False):
        assert torch.equal(tensor, wanted)
    for turn in range(2):
        owner.change(turn)
        expected, total = [tensor.clone() for tensor in owner.kept], owner.call()
        assert memory.leave() > 0 and not memory._memory.mapped  # type: ignore[attr-defined]
        memory.enter()
        assert [tensor.data_ptr() for tensor in owner.tensors] == addresses
        assert not owner.cache.any()
        for tensor, wanted in zip(owner.kept, expected, strict=True):
            assert torch.equal(tensor, wanted)
        assert owner.call() == total
        assert owner.parts["half"].data_ptr() == owner.parts["whole"].data_ptr() + 20 * MIB


@pytest.mark.nightly
def test_memory_that_another_process_took_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner(CPU)
    memory = DeviceMemoryAsleep(owner, CPU, [owner.cache])
    expected = owner.parts["whole"].clone()
    memory.leave()
    with monkeypatch.context() as patched:
        patched.setattr(HostMapped, "left", 60 * MIB)
        with pytest.raises(torch.OutOfMemoryError):
            memory.enter()
    memory.enter()
    assert torch.equal(owner.parts["whole"], expected)


@pytest.mark.parametrize(("before", "copied"), [([10 * MIB], 0), ([99 * MIB, 99 * MIB, 99 * MIB], 2)])
def test_a_host_without_memory_for_the_contents_keeps_them_where_they_are(
    before: list[int], copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [*before]
    monkeypatch.setattr(device_asleep, "available_memory", lambda: LEAST_FREE + (left.pop(0) if left else MIB))
    monkeypatch.setattr(pinned, "AHEAD", 1)
    owner = Owner(CPU)
    memory = DeviceMemoryAsleep(owner, CPU, [owner.cache])
    expected = owner.parts["whole"].clone()
    with pytest.raises(OSError, match=rf"{copied} of 4 parts are in the host's memory: they take 0\.1 GB, and 2\.1 GB"):
        memory.leave()
    assert torch.equal(owner.parts["whole"], expected)


def test_nothing_is_held_of_an_engine_that_is_gone() -> None:
    owner = Owner(CPU)
    memory = DeviceMemoryAsleep(owner, CPU, [owner.cache])
    gone = weakref.ref(memory), weakref.ref(owner.parts["whole"])
    memory.leave()
    del owner, memory
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_any_bit_that_changes_is_copied_again_and_what_changes_back_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bits at the top of words, and memory that has changed only while it was copied."""
    owner = Owner(CPU)
    memory = DeviceMemoryAsleep(owner, CPU, [owner.cache])
    whole = owner.parts["whole"].view(torch.int64)
    for place in (0, 5, 301):
        for bit in (63, 62, 31, 0):
            whole[place] ^= torch.tensor(1 << bit if bit < 63 else -(1 << 63))
            expected = whole.clone()
            memory.leave()
            memory.enter()
            assert torch.equal(whole, expected), (place, bit)
    copy_all = device_asleep.copy_all
    first = whole[:8].clone()

    def disturbed(*args: object, **options: object) -> None:
        whole[:8] = 5
        copy_all(*args, **options)  # type: ignore[arg-type]
        whole[:8] = first

    memory.leave()
    memory.enter()
    with monkeypatch.context() as patched:
        patched.setattr(device_asleep, "copy_all", disturbed)
        memory.keep(0)
    memory.leave()
    memory.enter()
    assert torch.equal(whole[:8], first)


def test_a_thread_that_copies_may_be_the_last_to_hold_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is gone while a part is copied: the thread ends."""
    begun, gone = threading.Event(), threading.Event()
    keep = DeviceMemoryAsleep.keep

    def slow(memory: DeviceMemoryAsleep, number: int) -> None:
        begun.set()
        gone.wait(60)
        keep(memory, number)

    monkeypatch.setattr(DeviceMemoryAsleep, "keep", slow)
    owner = Owner(CPU)
    memory = DeviceMemoryAsleep(owner, CPU, [owner.cache])
    assert memory._pins is not None
    thread = memory._pins._thread
    begun.wait(60)
    del owner, memory
    gone.set()
    thread.join(60)
    assert not thread.is_alive()
