"""The one decoder: modules chosen from a `ModelSpec`, run over a flat line of tokens from many requests."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from kvern.layers.attention import Attend
from kvern.layers.block import block_class
from kvern.layers.build import Build
from kvern.layers.embedding import Embedding
from kvern.layers.linear import Linear
from kvern.layers.loadable import Loadable
from kvern.layers.norm import make_norm
from kvern.layers.rope import RopeTable, Rotation
from kvern.model_spec import ModelSpec


@dataclass(frozen=True)
class Slot:
    """Where one checkpoint tensor goes: its shape there, and `load(tensor, first_row)`, see `Loadable.load`."""

    shape: tuple[int, ...]
    load: Callable[[Tensor, int], None]


class Decoder(nn.Module):
    """A language model with uninitialised weights; `kvern.models.loader` fills them."""

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__()
        self.spec, self.build = spec, build
        ropes = list(dict.fromkeys(layer.rope for layer in spec.layers if layer.rope is not None))
        self.rope_tables = nn.ModuleList(RopeTable(rope, build) for rope in ropes)
        self._rope_index = tuple(0 if layer.rope is None else ropes.index(layer.rope) for layer in spec.layers)
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, spec.embedding_scale, build)
        make = block_class(spec, build)
        self.layers = nn.ModuleList(make(index, spec, layer, build) for index, layer in enumerate(spec.layers))
        self.norm = make_norm(spec.norm, spec.hidden_size, "norm", build)
        self.lm_head = self._make_head()

    def _make_head(self) -> Linear:
        spec, build = self.spec, self.build
        head = build.column(spec.hidden_size, {"lm_head": spec.vocab_size}, bias=spec.lm_head_bias)
        if spec.tie_word_embeddings:
            head.weight = self.embed_tokens.weight
        return head

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, wanted: Tensor | None = None) -> Tensor:
        """Run the tokens of one step: `token_ids` and `positions`, both int64 `[T]` -> hidden states `[T, hidden]`.

        The tokens may belong to any number of requests: all that ties a token to its request is what `attend` does.
        With `wanted` [S], indices of tokens, only their states [S, hidden] are returned, and the last layer computes
        for the others no more than their keys and values.
        """
        rotations: list[Rotation] = [table(positions) for table in self.rope_tables] or [(positions, positions)]
        hidden: Tensor = self.embed_tokens(token_ids)
        update: Tensor | None = None
        for index, (layer, rope) in enumerate(zip(self.layers, self._rope_index, strict=True), 1):
            last = index == len(self.layers)
            hidden, update = layer(hidden, update, rotations[rope], attend, wanted if last else None)
        _, normal = self.norm.after(hidden, update)
        return normal

    def logits(self, hidden: Tensor, *, upcast: bool = True) -> Tensor:
        """Score the vocabulary: `hidden [N, hidden]` -> float32 `[N, vocab]`.

        Without `upcast` they keep the model's dtype where nothing is computed with them.
        """
        logits: Tensor = self.lm_head(hidden)
        if not upcast and self.spec.logit_scale == 1.0 and self.spec.logit_softcap is None:
            return logits
        logits = logits.float()
        if self.spec.logit_scale != 1.0:
            logits = logits.mul_(self.spec.logit_scale)
        if (cap := self.spec.logit_softcap) is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits

    def slots(self, stored: Collection[str] = ()) -> dict[str, Slot]:
        """Map the names of a Llama-style checkpoint to where each tensor goes.

        Modules that a checkpoint may store fused are listed fused if those names are among `stored`.
        """
        return dict(self._slots(stored))

    def _slots(self, stored: Collection[str]) -> Iterator[tuple[str, Slot]]:
        for path, module in self.named_modules():
            if isinstance(module, Loadable):
                prefix = _checkpoint_prefix(path)
                fused = module.fused_parts()
                parts = fused if any(prefix + name in stored for name in fused) else module.parts()
                for name, shape in parts.items():
                    if not (self.spec.tie_word_embeddings and name == "lm_head.weight"):
                        yield prefix + name, Slot(shape, partial(module.load, name))


def _checkpoint_prefix(path: str) -> str:
    """What precedes the part names of the module at `path`; norms of queries and keys count as the attention's own."""
    parent = path.rpartition(".")[0].removesuffix(".norm_before").removesuffix(".norm_after")
    return "" if path == "lm_head" else f"model.{parent}." if parent else "model."
