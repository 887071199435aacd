"""The description of what makes rows of embeddings of images, beside the language model of a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvern.spec.model import Activation, MlpSpec, ModelSpec, NormSpec

SLICE_PAIRS = 2**27
"""Pairs of patches that attend at once at most: 1.7 ms of an H200, with 16 heads of 72."""


@dataclass(frozen=True)
class PatchRopeSpec:
    """Rotary embeddings of patches by row and column.

    The planes of rows come first. "alternate": of `dim` / 2 frequencies every other one is a row's, the others are a
    column's. "twice": both have the same `dim` / 4 frequencies. "pairs": likewise, but each frequency's plane of
    columns comes first, and its plane of rows next.
    """

    theta: float
    dim: int
    order: Literal["alternate", "twice", "pairs"]


@dataclass(frozen=True)
class WindowSpec:
    """Squares of `side` x `side` patches, cut at an image's edges, which see themselves alone but in layers `whole`."""

    side: int
    whole: tuple[int, ...]


@dataclass(frozen=True)
class MergingSpec:
    """The way from the patches' states to rows `[N, hidden]`: a norm, if there is one, `merge` x `merge` patches side
    by side, and two matrices with `inner` numbers between them, on which `activation` stands.

    `reduces`: another matrix first makes one state of the patches; side by side are then their channels, not they.
    `late`: the norm is of the patches side by side.
    """

    hidden: int
    inner: int
    merge: int
    activation: str
    norm: "NormSpec | None"
    bias: bool = False
    reduces: bool = False
    late: bool = False


@dataclass(frozen=True)
class PoolingSpec:
    """The way from the patches' states to rows `[N, hidden]`: the mean of `merge` x `merge` patches times `scale`,
    which a bias and a factor of each channel make `standard`, a norm, and a matrix.
    """

    hidden: int
    merge: int
    norm: "NormSpec"
    scale: float = 1.0
    standard: bool = False


@dataclass(frozen=True)
class GatedSpec:
    """Another way to rows: one matrix of `merge` x `merge` patches side by side, one of that, a norm and GELU, and a
    gated MLP of width `inner` with `activation`."""

    hidden: int
    inner: int
    merge: int
    activation: "Activation"
    norm: "NormSpec"


@dataclass(frozen=True)
class MatrixSpec:
    """One matrix for the states of `merge` x `merge` patches side by side."""

    hidden: int
    merge: int


@dataclass(frozen=True)
class LeadSpec:
    """One row `[hidden]` of each piece: a matrix for the state that stands before its patches."""

    hidden: int
    merge: int = 1


@dataclass(frozen=True)
class ProbeSpec:
    """One row `[hidden]` of each piece: a learned query attends to the states of its patches, and an MLP after a norm
    is added to what it finds."""

    hidden: int
    heads: int
    mlp: "MlpSpec"
    norm: "NormSpec"
    merge: int = 1


ProjectorSpec = MergingSpec | PoolingSpec | GatedSpec | MatrixSpec | LeadSpec | ProbeSpec
"""The kinds of projectors."""


@dataclass(frozen=True)
class TapSpec:
    """A projector more, after a layer of the tower; its rows are added to states of the language model."""

    layer: int
    projector: ProjectorSpec


@dataclass(frozen=True)
class ImageTokens:
    """The tokens of an image in a prompt: `begin`, rows of `image`, each ended by `row_end`, the last by `end`.

    With a `tile` these are the rows of a picture in tiles: before each stands this text with its {row} and {column},
    and after the rows another `row_end` and the whole picture, between `begin` and `end`. An image without tiles is
    the whole picture alone. `special`: what the texts have of the tokenizer's special tokens.

    A chat template writes a `mark`, or `image`; `placed` is the text that takes the place of a mark.
    """

    image: str
    row_end: str | None = None
    end: str | None = None
    begin: str = ""
    tile: str | None = None
    special: tuple[str, ...] = ()
    mark: str = ""
    placed: str = ""


@dataclass(frozen=True)
class VisionSpec:
    """An encoder of images.

    tower      the layers over patches, `[P, tower.hidden_size]`; each sees those of its own piece of an image
    patch      pixels on the side of a patch
    image_id   the id of tokens that have a row of an image; -1: that of `tokens.image` in the tokenizer
    table      the side of a square table of learned positions, between which patches lie; 0: there is none
    between    how they lie between them: "corners" and "centres" are linear, the latter over means of positions that
               are nearer to each other than patches, and "cubic" is by centres
    patch_bias the pixels' matrix has a bias
    patch_norm, first_norm, last_norm: a norm stands before positions are added, after that, after the last layer
    windows    None: each patch sees the whole image in all layers
    axes       tokens of images have positions by row and column in the language model, too
    taps       in the order of layers; the rows of the n-th are added to the states of tokens after the n-th layer
               of the language model
    learned    "lead": a state that stands before the patches of each piece, at a position of its own, and makes no row;
               "newline": a row that ends lines of tokens
    by_axis    positions are the sum of those of a column and of a row, each out of a table of so many
    clipped    products of the layers have bounds
    spans      the tokens of an image see each other, in those layers of the language model that have spans
    settings   `module:function`, which makes ImageSettings of the folder's image processor and this spec
    """

    tower: "ModelSpec"
    patch: int
    rope: PatchRopeSpec | None
    projector: ProjectorSpec
    tokens: ImageTokens
    image_id: int
    settings: str
    table: int = 0
    between: Literal["corners", "centres", "cubic"] = "corners"
    patch_bias: bool = False
    patch_norm: bool = False
    first_norm: bool = False
    last_norm: bool = False
    windows: WindowSpec | None = None
    axes: bool = False
    taps: tuple[TapSpec, ...] = ()
    by_axis: bool = False
    clipped: bool = False
    spans: bool = False
    learned: tuple[Literal["lead", "newline"], ...] = ()

    @property
    def lead(self) -> bool:
        """A learned state stands before the patches of each piece."""
        return "lead" in self.learned

    def slices(self, patches: Sequence[int]) -> list[int]:
        """The slices of patches in which each layer attends, for pieces of so many patches: a step may go on between.

        Patches of a single piece all attend to each other, which takes most of the time if it is large.
        """
        pairs = patches[0] ** 2 if len(patches) == 1 else 0
        count = max(1, -(-pairs // SLICE_PAIRS))
        whole = range(len(self.tower.layers)) if self.windows is None else self.windows.whole
        return [count if index in whole else 1 for index in range(len(self.tower.layers))]

    def parts(self, patches: Sequence[int]) -> int:
        """The parts in which an image is encoded: a layer, or if it has slices keys and values, and each slice."""
        return sum(count + (count > 1) for count in self.slices(patches))

    @property
    def merge(self) -> int:
        """The patches on the side of what becomes one token."""
        return self.projector.merge
