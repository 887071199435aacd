"""Weights that take the place of others while requests go on: where they are read, and what was found there."""

from typing import Annotated, Literal

import msgspec

LONGEST_TIMEOUT = 24 * 3600.0


class WeightSource(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A folder with safetensors files, or one such file, that has all tensors of a model or some.

    `stamp`: that of `WeightsFound`, which its files must still have; empty: any. `names`: likewise.
    """

    path: str
    stamp: str = ""
    names: str = ""


class GroupTensor(msgspec.Struct, frozen=True):
    """A tensor that a process group brings; `dtype` is PyTorch's name of it."""

    name: str
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=1)], ...]


class WeightGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process group whose first member broadcasts tensors, in this order, and where its members meet.

    `rank`: that of this server in it. `timeout`: seconds for all of it.
    """

    address: str
    world_size: Annotated[int, msgspec.Meta(ge=2)]
    tensors: Annotated[list[GroupTensor], msgspec.Meta(min_length=1)]
    backend: Literal["gloo", "nccl"] = "gloo"
    rank: Annotated[int, msgspec.Meta(ge=1)] = 1
    timeout: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_TIMEOUT)] = 300.0


class WeightsFound(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of reading new weights.

    error       why they cannot be taken; None: they are loaded beside those that steps use
    is_refused  the engine cannot change its weights, whatever they are
    is_whole    the last source has all tensors: earlier ones count for nothing
    stamp       names the sizes and times of the last source's files
    names       a digest of the names of its tensors: an earlier source with the same ones counts for nothing
    """

    error: str | None = None
    is_refused: bool = False
    is_whole: bool = False
    stamp: str = ""
    names: str = ""


def weights_prefix(version: str) -> bytes:
    """The beginning of namespaces of blocks that were computed with weights of this version; empty: the first ones."""
    return b"weights %s\0" % version.encode() if version else b""
