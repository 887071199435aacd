"""What an engine on a GPU waits for, begun in threads while PyTorch is still being imported."""

import ctypes
import threading

_threads: list[threading.Thread] = []


def begin() -> None:
    """Begin, if there is a GPU of NVIDIA."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    if not driver.cuInit(0):
        _threads.append(threading.Thread(target=_make_context, args=(driver,), name="ahead-context", daemon=True))
        _threads.append(threading.Thread(target=_identify_triton, name="ahead-triton", daemon=True))
        for thread in _threads:
            thread.start()


def finish() -> None:
    """Wait for what was begun: nothing of it must be under way in a process that is forked."""
    while _threads:
        _threads.pop().join()


def _make_context(driver: ctypes.CDLL) -> None:
    """Have the driver make the first GPU's primary context, which PyTorch uses as well: 0.3 s and more."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if not driver.cuDeviceGet(ctypes.byref(device), 0):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _identify_triton() -> None:
    """Have Triton read itself, 400 MB, which is part of the names of what it keeps in its cache."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:
        return
    triton_key()
