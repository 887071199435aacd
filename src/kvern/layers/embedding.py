"""The table of token embeddings."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.layers.build import Build
from kvern.layers.loadable import Loadable, copy_rows


class Embedding(Loadable):
    """`ids [T] -> [T, hidden]`, times `scale` rounded to the model's dtype, as the models that scale were trained."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float, build: Build) -> None:
        super().__init__()
        self.weight = build.empty(vocab_size, hidden_size)
        self.scale = float(torch.tensor(scale, dtype=build.dtype))

    def forward(self, ids: Tensor) -> Tensor:
        embedded = F.embedding(ids, self.weight)
        return embedded if self.scale == 1.0 else embedded * self.scale

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {"embed_tokens.weight": tuple(self.weight.shape)}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        copy_rows(self.weight, tensor, first_row)
