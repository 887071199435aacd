"""The description of what makes rows of embeddings of images, beside the language model of a checkpoint."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvern.spec.model import ModelSpec, NormSpec


@dataclass(frozen=True)
class PatchRopeSpec:
    """Rotary embeddings of patches by row and column.

    "alternate": of `dim` / 2 frequencies every other one turns by the row, the others by the column; the planes of rows
    come first.
    """

    theta: float
    dim: int
    order: Literal["alternate"] = "alternate"


@dataclass(frozen=True)
class ProjectorSpec:
    """The way from the patches' states to rows `[N, hidden]`: a norm, one state of `merge` x `merge` patches, and two
    matrices between which `activation` stands."""

    hidden: int
    merge: int
    activation: str
    norm: "NormSpec"
    bias: bool = False


@dataclass(frozen=True)
class ImageTokens:
    """The tokens of an image in a prompt: rows of `image`, each ended by `row_end`, the last by `end`."""

    image: str
    row_end: str | None = None
    end: str | None = None


@dataclass(frozen=True)
class VisionSpec:
    """An encoder of images.

    tower      the layers over patches, `[P, tower.hidden_size]`; each sees those of its own image
    patch      pixels on the side of a patch
    image_id   the id of tokens that have a row of an image
    """

    tower: "ModelSpec"
    patch: int
    rope: PatchRopeSpec
    projector: ProjectorSpec
    tokens: ImageTokens
    image_id: int
    settings: str
    """The function of `images/settings.py` that reads the folder's settings."""
