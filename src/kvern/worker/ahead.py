"""What an engine on a GPU waits for, begun in threads while PyTorch is still being imported."""

import ctypes
import threading


def begin() -> None:
    """Begin; whoever needs the results waits for them, or makes them if there are none."""
    for work in (_make_context, _identify_triton):
        threading.Thread(target=work, name=f"ahead-{work.__name__}", daemon=True).start()


def _make_context() -> None:
    """Have the driver make the first GPU's primary context, which PyTorch uses as well: 0.3 s and more."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return  # no GPU of NVIDIA; whether that is an error is decided where the device is chosen
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), 0):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _identify_triton() -> None:
    """Have Triton read itself, 400 MB, which is part of the names of what it keeps in its cache."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:
        return
    triton_key()
