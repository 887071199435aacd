"""NVIDIA's driver as `pynvml` tells of it, where there is none."""

from types import SimpleNamespace


class Driver:
    """Cards as NVIDIA's driver tells of them."""

    NVMLError = OSError

    def __init__(self, *cards: tuple[str, int, int]) -> None:
        self.cards = cards

    def nvmlInit(self) -> None:  # noqa: N802 (the driver's name, as the others)
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
        return number

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return self.cards[handle][0]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=self.cards[handle][1], free=self.cards[handle][2])
