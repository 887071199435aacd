"""Tensors as an engine has them, which are to be given back."""

import torch

MIB = 1 << 20


class Owner:
    """Tensors of which some share memory, and some are found in what functions keep."""

    def __init__(self, device: torch.device) -> None:
        whole = torch.randn(40 * MIB // 4, device=device)
        self.parts = {"whole": whole, "half": whole[len(whole) // 2 :], "turned": whole.view(1024, -1).t()}
        self.weight = torch.nn.Parameter(torch.randn(3 * MIB, device=device).bfloat16(), requires_grad=False)
        kept = torch.randint(0, 9, (5 * MIB,), device=device, dtype=torch.int8)
        self.call = lambda: int(kept.sum())
        self.cache = torch.ones(2, 64 * MIB, device=device, dtype=torch.uint8)
        self.keys, self.values = self.cache
        self.small = torch.randn(100, device=device)

    @property
    def kept(self) -> list[torch.Tensor]:
        """Those whose contents stay."""
        return [*self.parts.values(), self.weight, self.small]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.kept, self.keys, self.values]

    def change(self, turn: int) -> None:
        """Have other contents than before."""
        self.parts["half"][turn * 1000 : turn * 1000 + 7] = turn
        self.weight[-1 - turn] = 3.0
        self.cache.fill_(turn + 5)


Owner.__module__ = "kvern.tests"  # only what is kvern's is looked into
