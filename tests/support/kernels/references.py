"""Reference results of norms and roundings, and the relative error of a result."""

import torch

from kvern.kernels.quantize_rows import Coding


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def codings(device: torch.device) -> dict[str, Coding]:
    """Ways to round rows, by name."""
    static = torch.full((1,), 0.01, device=device)
    return {
        "e4m3": Coding("e4m3"),
        "int8 with a limit": Coding("int8", limit=1.5),
        "int8 by a known scale": Coding("int8", static=static),
        "e4m3 by 32": Coding("e4m3", 32),
        "int8 by 32 in columns": Coding("int8", 32, columns=True),
    }


CODINGS = tuple(codings(torch.device("cpu")))
