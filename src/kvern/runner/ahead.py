"""Work that an engine on a GPU waits for, begun in threads while PyTorch is still being imported."""

import ctypes
import threading
from collections.abc import Callable
from functools import partial

_threads: list[threading.Thread] = []


def identify_triton() -> None:
    """Have Triton read itself, 400 MB, which is part of the names of what it keeps in its cache."""
    if _driver() is not None:
        _begin(_identify_triton)


def make_context() -> None:
    """Have the driver make the first GPU's primary context, which PyTorch uses as well: 0.3 s and more."""
    driver = _driver()
    if driver is not None:
        _begin(partial(_make_context, driver))


def finish() -> None:
    """Wait for what was begun: nothing of it must be under way in a process that is forked."""
    while _threads:
        _threads.pop().join()


def _begin(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, name="ahead", daemon=True)
    _threads.append(thread)
    thread.start()


def _driver() -> ctypes.CDLL | None:
    """NVIDIA's, if there is one."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _make_context(driver: ctypes.CDLL) -> None:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), 0):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _identify_triton() -> None:
    try:
        from triton.runtime.cache import triton_key
    except ImportError:
        return
    triton_key()
