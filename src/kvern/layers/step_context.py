"""The context in which layers compute a step's tokens: rotations, the cache, states and adapters."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kvern.layers.rope import Rotation


class Attend(Protocol):
    """Stores a step's keys and values and attends to what each token may see of its request, causally in decoders."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`query [T, heads, head_dim]`, `key` and `value [T, kv_heads, head_dim]` -> `[T, heads, head_dim]`.

        The inputs are rotated and normalised already; they may be views with gaps between rows. Where values are the
        first `AttentionSpec.value_dim` entries of keys, `value` and the result have as many.
        """


class PagedAttend(Attend, Protocol):
    """An `Attend` whose cache others write to: queries then attend to what is stored."""

    def slot_mapping(self, layer: int) -> Tensor:
        """`[T] int64`, where each token's key and value go: block * block_size + offset."""

    def cache(self, layer: int) -> Tensor:
        """`[2, blocks, block_size, kv_heads, head_dim]`; `[1, ...]` where values are the first entries of keys."""

    def scales(self, layer: int) -> Tensor | None:
        """`[2, kv_heads]` float32, by which the codes of a cache in 8 bits are keys and values; None: it is plain."""

    def over_cache(self, layer: int, query: Tensor, wanted: Tensor | None = None) -> Tensor:
        """`query [T, heads, head_dim]` over the stored keys and values -> `[T, heads, head_dim]`.

        With `wanted`, the indices [S] of the step's tokens that are sampled from, theirs alone: `[S, heads, head_dim]`.
        """


class SlicedAttend(PagedAttend, Protocol):
    """A `PagedAttend` of one text that gives queries back, and attends when it is asked for a slice of them."""

    def of(self, layer: int, query: Tensor) -> Tensor:
        """The attention of queries `[S, heads, head_dim]` to all keys that a layer has handed over last."""


class Context(NamedTuple):
    """The keys that a request's tokens of a step, `tokens`, see: `places [keys]` int64 in the cache.

    A place is block * block_size + offset; the last ones are the tokens' own, which are stored by then.
    """

    tokens: slice
    places: Tensor


class ReadableAttend(PagedAttend, Protocol):
    """A `PagedAttend` whose cache others read, too."""

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store keys and values `[T, kv_heads, head_dim]`, and attend to nothing."""

    def contexts(self, layer: int) -> list[Context]:
        """The context of each request of the step."""


class ExpandedRuns(Protocol):
    """Runs of queries, from the step's token `first` on, that attend to what is made of latents.

    `whole`: they are all runs of the step.
    """

    first: int
    whole: bool

    def attend(self, cache: Tensor, own: Tensor, rotated: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Write the sums of values of these tokens to `out`; shapes are in `attention/expanded.py`."""


class ExpandingAttend(PagedAttend, Protocol):
    """A `PagedAttend` over latents, of which keys and values may be made."""

    expanded: ExpandedRuns | None


class WantedAttend:
    """The `Attend` of layers that store nothing, and compute the tokens `wanted` [S] of a step of `tokens` tokens."""

    def __init__(self, attend: PagedAttend, wanted: Tensor, tokens: int) -> None:
        self._attend = attend
        self._wanted = wanted
        self._tokens = tokens

    def over_cache(self, layer: int, query: Tensor, wanted: None = None) -> Tensor:
        """`query [S, heads, head_dim]` over the stored keys and values -> `[S, heads, head_dim]`."""
        all_queries = query.new_zeros((self._tokens, *query.shape[1:])).index_copy_(0, self._wanted, query)
        return self._attend.over_cache(layer, all_queries, self._wanted)


class StepAdapters(NamedTuple):
    """The adapters that a step's rows use, in the form that the adapted linear layers take; None: no row uses one.

    `rows` are all tokens of the step, `wanted` those whose output is: fewer in a last layer, else the same.
    """

    rows: Any = None
    wanted: Any = None


NO_ADAPTERS = StepAdapters()


class StepContext(NamedTuple):
    """The context in which a layer computes a step's rows.

    rotation     that of the layer's queries and keys
    attend       the cache, which stores keys and values and attends to them
    states       a `StepStates` or `DeviceStates`: the states of the tokens' requests; None in a model without any
    wanted       [S] int64, the indices of the tokens whose results are needed; None: those of all. The others are still
                 stored for later tokens
    adapters     those of the tokens, and of the wanted ones
    layer_input  [T, width], the layer's part of `PerLayerInputs`; None in a model without any
    """

    rotation: Rotation
    attend: Attend
    states: Any = None
    wanted: Tensor | None = None
    adapters: StepAdapters = NO_ADAPTERS
    layer_input: Tensor | None = None


def rows_of(x: Tensor, wanted: Tensor | None) -> Tensor:
    """The rows of x that are wanted; None: all."""
    return x if wanted is None else x.index_select(0, wanted)
