"""What a GPU's engine has moves to memory that can be given back, and comes back with its contents: on the host's."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from kvern.runner import device_asleep
from kvern.runner.device_asleep import DeviceMemoryAsleep
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
    for turn in range(3):
        owner.change(turn)
        expected, total = [tensor.clone() for tensor in owner.kept], owner.call()
        assert memory.leave() > 0
        assert not torch.equal(owner.kept[0], expected[0]), "it is given back"
        memory.enter()
        assert [tensor.data_ptr() for tensor in owner.tensors] == addresses
        assert not owner.cache.any()
        for tensor, wanted in zip(owner.kept, expected, strict=True):
            assert torch.equal(tensor, wanted)
        assert owner.call() == total
        assert owner.parts["half"].data_ptr() == owner.parts["whole"].data_ptr() + 20 * MIB


def test_memory_that_another_process_took_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner(CPU)
    memory = DeviceMemoryAsleep(owner, CPU, [owner.cache])
    expected = owner.parts["whole"].clone()
    memory.leave()
    with monkeypatch.context() as patched:
        patched.setattr(HostMapped, "failing", True)
        with pytest.raises(torch.OutOfMemoryError):
            memory.enter()
    memory.enter()
    assert torch.equal(owner.parts["whole"], expected)


def test_a_host_without_memory_for_the_contents_keeps_them_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_asleep, "available_memory", lambda: 10 * MIB)
    owner = Owner(CPU)
    memory = DeviceMemoryAsleep(owner, CPU, [owner.cache])
    expected = owner.parts["whole"].clone()
    with pytest.raises(OSError, match=r"take 0\.1 GB of the host's memory, of which 0\.0 GB are free"):
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
