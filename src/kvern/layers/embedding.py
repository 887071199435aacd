"""Tables with a row for each token, and heads with a score for each."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.device import marks
from kvern.layers.build import Build
from kvern.layers.linear import Linear, Weighted
from kvern.layers.linear_format import LinearFormat
from kvern.layers.linear_method import LinearMethod, LinearShape
from kvern.layers.loadable import Loadable, copy_rows
from kvern.ranks.ranks import PaddedShare, Share

if TYPE_CHECKING:
    from kvern.kernels.quantize_rows import RowCodes


class EmbeddedTokens(NamedTuple):
    """T tokens, some of which are given by rows of embeddings in the place of their ids.

    token_ids  [T] int64; the ids of tokens that have rows only have to be in the vocabulary
    source     [T] integers: the index of the row of each token; -1: the token has its id alone
    rows       [N, (1 + D) * hidden], N >= 1, in the model's dtype: first what the first layer reads, after any scale of
               embeddings, then what is added to the states after each of the first D layers
    """

    token_ids: Tensor
    source: Tensor
    rows: Tensor

    def over(self, hidden: Tensor) -> Tensor:
        """The embeddings `hidden` [T, hidden] of the ids, where rows take their places."""
        given = self.rows[:, : hidden.shape[1]].index_select(0, self.source.clamp(min=0).long())
        return torch.where((self.source >= 0)[:, None], given, hidden)

    def deepened(self, layer: int, hidden: Tensor, wanted: Tensor | None) -> Tensor:
        """The states `hidden` after a layer, of all tokens or of the tokens `wanted` [S], plus what the rows of images
        add after this layer (DeepStack)."""
        width = hidden.shape[1]
        added = self.rows[:, (1 + layer) * width : (2 + layer) * width]
        if not added.shape[1]:
            return hidden
        source = self.source if wanted is None else self.source.index_select(0, wanted)
        given = added.index_select(0, source.clamp(min=0).long())
        return hidden + torch.where((source >= 0)[:, None], given, 0)


class Embedding(Weighted):
    """`ids [T] -> [T, width]`, times `scale` rounded to the model's dtype, as the models that scale were trained.

    `name` is the table's in a checkpoint. A rank may have a share of the tokens, `vocab_size`, or of each row, `width`.
    """

    def __init__(
        self,
        vocab_size: int | PaddedShare,
        width: int | Share,
        scale: float,
        build: Build,
        *,
        name: str = "embed_tokens",
    ) -> None:
        super().__init__(width, {name: vocab_size}, build)
        self._multiply = build.ops.scale
        self.scale = float(torch.tensor(scale, dtype=build.dtype))

    def _make_method(self, build: Build) -> LinearMethod:
        [(name, vocab_size)] = self.outputs.items()
        return self._stored(
            build.linear_format(name), LinearShape(vocab_size, self.inputs, self.dtype, self.device), build
        )

    def _stored(self, stored: LinearFormat, shape: LinearShape, build: Build) -> LinearMethod:
        return stored.embedding(shape, build)

    def forward(self, ids: Tensor) -> Tensor:
        marks.begin(marks.EMBEDDING)
        embedded = self.method.embed(ids)
        return embedded if self.scale == 1.0 else self._multiply(embedded, self.scale)


class SharedEmbedding(Embedding):
    """A rank's share of the vocabulary; it knows nothing of other tokens, which other ranks add."""

    def __init__(self, vocab_size: int, width: int, scale: float, build: Build) -> None:
        multiple, _ = build.whole_method({"embed_tokens": vocab_size}, width).cuts()
        padded = build.ranks.padded_share(vocab_size, multiple)
        super().__init__(padded, width, scale, build)
        self._held_ids, self._ranks = padded.share.held, build.ranks

    def forward(self, ids: Tensor) -> Tensor:
        marks.begin(marks.EMBEDDING)
        embedded = self._ranks.sum(self.method.embed_share(ids, self._held_ids))
        return embedded if self.scale == 1.0 else self._multiply(embedded, self.scale)


class SharedHead(Linear):
    """A rank's share of the vocabulary's scores, which all put side by side: `[T, inputs] -> [T, vocabulary]`."""

    def __init__(
        self, inputs: int, vocab_size: int, build: Build, *, bias: bool = False, method: LinearMethod | None = None
    ) -> None:
        stored = method or build.whole_method({"lm_head": vocab_size}, inputs)
        padded = build.ranks.padded_share(vocab_size, stored.cuts()[0])
        super().__init__(inputs, {"lm_head": padded}, build, bias=bias, method=method)
        self._vocab_size = vocab_size
        self._ranks = build.ranks
        self.held = padded.share.held

    def forward(self, x: "Tensor | RowCodes", rows: Any = None) -> Tensor:
        return self.whole(super().forward(x, rows))

    def scores(self, x: Tensor) -> Tensor:
        return self.whole(super().scores(x))

    def own(self, x: Tensor) -> Tensor:
        """The scores of the rank's share: of the tokens `held`, and columns that pad."""
        return super().forward(x)

    def own_scores(self, x: Tensor) -> Tensor:
        """The float32 scores of the rank's share."""
        return super().scores(x)

    def whole(self, scores: Tensor) -> Tensor:
        """The results of `own` or `own_scores` of all ranks, side by side: `[T, vocabulary]`."""
        return self._ranks.beside(scores, self._vocab_size)


def make_embedding(vocab_size: int, width: int, scale: float, build: Build) -> Embedding:
    """The embedding of the whole vocabulary, which several ranks divide among them."""
    make = Embedding if build.ranks.size == 1 else SharedEmbedding
    return make(vocab_size, width, scale, build)


def make_head(
    inputs: int, vocab_size: int, build: Build, *, bias: bool = False, method: LinearMethod | None = None
) -> Linear:
    """Scores `[T, inputs] -> [T, vocabulary]`, which several ranks divide among them and all of them have then.

    `method`: another's, whose weight it shares.
    """
    if build.ranks.size > 1:
        return SharedHead(inputs, vocab_size, build, bias=bias, method=method)
    return Linear(inputs, {"lm_head": vocab_size}, build, bias=bias, method=method)


class Table(Loadable):
    """Rows `[count, width]` of learned positions, or of kinds of tokens; the checkpoint calls them `name`."""

    def __init__(self, name: str, count: int, width: int, build: Build) -> None:
        super().__init__(build.path)
        self.name = name
        self.weight = build.empty(count, width)

    def forward(self, ids: Tensor) -> Tensor:
        """`ids [T] int64 -> [T, width]`."""
        return F.embedding(ids, self.weight)

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {f"{self.name}.weight": tuple(self.weight.shape)}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        copy_rows(self.weight, tensor, first_row)


class LookupTable(Embedding):
    """A table that nothing is multiplied by. Of the tokens of `padding` all have the row of the first."""

    padding: Sequence[int] = ()

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        super().load(part, tensor, first_row)
        held = range(first_row, first_row + len(tensor))
        if self.padding and self.padding[0] in held:
            self._row = tensor[self.padding[0] - first_row, None].clone()
        for token in self.padding[1:]:
            if self.padding[0] in held or (token in held and self.padding[0] < first_row):
                super().load(part, self._row, token)

    def _stored(self, stored: LinearFormat, shape: LinearShape, build: Build) -> LinearMethod:
        return stored.table(shape, build)


class ShortTable(LookupTable):
    """One without rows for the last tokens, which take the first row."""

    def forward(self, ids: Tensor) -> Tensor:
        [count] = self.outputs.values()
        return super().forward(torch.where(ids < count, ids, 0))
