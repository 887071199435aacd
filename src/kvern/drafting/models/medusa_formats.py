"""Checkpoints of Medusa heads, by whom they are written:

    0.0.linear.*, 0.1.weight                                     its authors, in medusa_lm_head.pt or safetensors
    blocks.0.layers.0.*, lm_heads.0.weight, token_map            vLLM
    medusa_heads.0.medusa_layers.0.linear.*, *.0.lm_head.weight  TensorRT-LLM

The first number is the head's, the second that of its layer. Without output layers heads use the model's.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kvern.drafting.models.medusa_heads import MedusaHeads, MedusaSpec
from kvern.errors import UnsupportedModel
from kvern.layers.linear_format import LinearFormat
from kvern.models.checkpoint import StoredTensor, read_headers
from kvern.models.decoder import Decoder
from kvern.models.hub import MEDUSA
from kvern.models.loader import filled_model, llama_name, read_config, stored_methods
from kvern.models.registry import Config
from kvern.models.torch_file import read_torch_file
from kvern.spec.model import ModelSpec, Rename


def _differences(token_ids: Tensor, model: ModelSpec) -> Tensor:
    return token_ids - torch.arange(len(token_ids), device=token_ids.device)


_RENAMES = (
    Rename(r"^(medusa_heads?\.|heads\.)?(?=\d|blocks\.|lm_heads\.)", ""),
    Rename(r"^(\d+)\.(?:medusa_layers\.)?(\d+)\.linear\.", r"heads.\1.\2.linear."),
    Rename(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"heads.\1.\2.linear."),
    Rename(r"^(?:(\d+)\.\d+|(\d+)\.lm_head|lm_heads\.(\d+))\.(?=weight$)", r"heads.\1\2\3.lm_head."),
    Rename(r"^token_map$", "d2t", _differences),
)
MOST = 64
"""Heads, and layers of each: beyond any that were trained."""
_OUTPUT = r"(lm_head|token_map|\d\.\d+\.weight)"
"""Tensors that are not read if heads use the model's output layer."""


def load_medusa(
    folder: Path,
    target: Decoder,
    *,
    load_format: Literal["auto", "dummy"] = "auto",
    unquantized: LinearFormat | None = None,
) -> MedusaHeads:
    """Build the heads of a folder for `target`, in its precision and on its device, and load their weights.

    Options as those of `load_model`. Raises ModelNotFound, UnsupportedModel or CorruptCheckpoint.
    """
    config, stored = read_config(folder), None if load_format == "dummy" else _stored(folder)
    medusa = read_medusa(config, target.spec, stored)
    ignored = () if medusa.own_output else (_OUTPUT,)
    model = replace(
        target.spec, layers=(), renames=_RENAMES, ignored=ignored, tie_word_embeddings=False, draft_head=None
    )
    linear = stored_methods(config, model, stored or [], unquantized)
    build = replace(target.build, linear=linear)
    return filled_model(lambda model, build: MedusaHeads(medusa, target, model, build), model, build, folder, stored)


def _stored(folder: Path) -> list[StoredTensor]:
    saved = folder / MEDUSA
    return read_torch_file(saved) if saved.is_file() and not any(folder.glob("*.safetensors")) else read_headers(folder)


def read_medusa(config: Config, target: ModelSpec, stored: Sequence[StoredTensor] | None) -> MedusaSpec:
    """Returns the heads for `target` described by a `config.json` and its stored tensors (None without files).

    Published configurations name fewer heads than there are: those that are stored count. Raises UnsupportedModel.
    """
    heads = _count(config, "medusa_num_heads", "num_heads")
    layers = _count(config, "medusa_num_layers", "num_hidden_layers")
    own_output = not config.get("original_lm_head", False)
    if stored is None:
        drafted = config.get("truncated_vocab_size") or target.vocab_size
        drafted = None if drafted == target.vocab_size else drafted
        return MedusaSpec(heads, layers, own_output=own_output, drafted=drafted)
    named = {llama_name(tensor.name, _RENAMES)[0]: tensor.shape for tensor in stored}
    places = [re.match(r"heads\.(\d+)\.(\d+)\.linear\.", name) for name in named]
    found = [(int(place[1]), int(place[2])) for place in places if place is not None]
    heads = _checked("the files' number of heads", max([heads, *(head + 1 for head, _ in found)]))
    layers = _checked("the files' number of layers", max([layers, *(layer + 1 for _, layer in found)]))
    outputs = [shape for name, shape in named.items() if name.endswith(".lm_head.weight") and shape]
    drafted = math.prod(named["d2t"]) if "d2t" in named else None
    own_output = own_output and bool(outputs)
    width = next((shape[-1] for name, shape in named.items() if name.endswith(".linear.weight") and shape), None)
    if width is not None and width != target.hidden_size:
        raise UnsupportedModel(
            f"the Medusa heads read states of {width} numbers, and the model's have {target.hidden_size}"
        )
    if own_output and drafted is None and outputs[0][0] != target.vocab_size:
        raise UnsupportedModel(
            f"the Medusa heads are for a vocabulary of {outputs[0][0]} tokens, and the model has {target.vocab_size}"
        )
    bias = any(name.endswith(".linear.bias") for name in named)
    return MedusaSpec(heads, layers, bias, own_output, drafted)


def _count(config: Config, *names: str) -> int:
    """The first of these that a configuration has. Raises UnsupportedModel."""
    return _checked(*next(((name, config[name]) for name in names if name in config), (names[0], None)))


def _checked(name: str, count: object) -> int:
    if type(count) is not int or not 1 <= count <= MOST:
        raise UnsupportedModel(f"{name} is {count!r:.60}: it must be from 1 to {MOST} for Medusa heads")
    return count
