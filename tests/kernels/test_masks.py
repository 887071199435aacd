"""The kernel leaves what the masks allow, as PyTorch does it."""

import pytest
import torch

from kvern.kernels import masks as kernel
from kvern.structured.masks import restrict


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [31, 4096, 9000])
def test_what_is_not_allowed_is_gone(device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    logits = torch.randn(6, vocabulary, device=device).to(dtype)
    logits[:, ::3] = float("-inf")  # banned already
    rows = torch.tensor([4, 0, 3, 5], device=device)
    masks = torch.randint(-(2**31), 2**31, (4, -(-vocabulary // 32)), device=device).int()
    masks[1] = 0
    masks[1, 0] = 0b1001  # tokens 0 and 3, which are banned: the mask goes before
    masks[2] = 0
    masks[2, -1] = 1 << ((vocabulary - 2) % 32)  # one token at the very end
    expected = logits.clone()
    restrict(expected, rows, masks)
    kernel.restrict(logits, rows, masks)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    assert logits[0].isfinite().nonzero().flatten().tolist() == [0, 3]
