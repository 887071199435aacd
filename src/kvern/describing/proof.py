"""The description of a folder's model: found, fitted to all its tensors, and tried on its own first and last layers."""

import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from kvern.describing.facts import facts_of
from kvern.describing.search import Found, bound, difference, load, logits_of, search
from kvern.describing.small import TOKENS, far_position, logits_at
from kvern.errors import UnsupportedModel
from kvern.layers.build import Build
from kvern.models.checkpoint import StoredTensor, open_map, read_headers
from kvern.models.fallback.decoder import quiet
from kvern.models.fallback.description import read_config
from kvern.models.loader import check_fits, choose_dtype, llama_name, outline_of, stored_methods
from kvern.models.loader import read_config as read_settings
from kvern.spec.model import ModelSpec

MOST_FIRST = 4
"""Layers at the beginning that are tried with the last one, at most."""
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def describe(folder: Path) -> tuple[ModelSpec, list[str]]:
    """The specification of a folder's model, and what was proved of it, for people.

    Raises UnsupportedModel if none is found, CorruptCheckpoint if the folder's tensors do not fit it.
    """
    config = read_config(folder)
    if config.get_text_config() is not config:
        raise UnsupportedModel("it has parts beside its language model (text_config)")
    found = search(config)
    stored = read_headers(folder)
    settings = read_settings(folder, described=False)
    methods = stored_methods(settings, found.spec, stored)
    build = Build(choose_dtype("auto", found.spec, folder), torch.device("meta"), 1, linear=methods)
    check_fits(outline_of(found.spec, build), folder, stored)
    lines = [*_told(found), f"all {len(stored)} tensors of {folder} have a place"]
    if "quantization_config" in settings:
        return found.spec, [*lines, "its own layers were not computed: their weights are quantized"]
    return found.spec, [*lines, _try_own_layers(folder, config, found.spec, stored)]


def _told(found: Found) -> list[str]:
    spec = found.spec
    norms = ", ".join(f"{place}: {name}" for place, name in spec.block.norms.items()) or "none"
    scales = ", ".join(f"{scale:.6g}" for scale in (spec.scales.embedding, spec.block.scale, spec.scales.logit))
    kinds = len(set(spec.layers))
    rotated = "pairs" if found.choice.interleaved else "halves"
    return [
        f"{spec.model_type}: {len(spec.layers)} layers of {kinds} kinds, {spec.norm.kind} norms: {norms}",
        f"rotation in {rotated}; factors of embeddings, residuals and logits: {scales}",
        f"logits of a small random model are off by {found.off:.1g} of their spread ({found.tried} others were tried)",
    ]


def _try_own_layers(folder: Path, config: PreTrainedConfig, spec: ModelSpec, stored: list[StoredTensor]) -> str:
    """Compares transformers and kvern with the model's own embeddings, first and last layers and head, in float32.

    Raises UnsupportedModel if their logits differ.
    """
    count = len(spec.layers)
    cut, kept = _cut(config, count)
    spec = replace(spec, layers=tuple(spec.layers[place] for place in kept))
    ids = torch.randint(spec.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(0))
    with TemporaryDirectory() as name, quiet():
        part = Path(name)
        cut.save_pretrained(part)
        save_file(_tensors(spec, stored, kept), part / "model.safetensors", {"format": "pt"})
        model: Any = AutoModelForCausalLM.from_pretrained(
            part, dtype=torch.float32, attn_implementation="eager", local_files_only=True, trust_remote_code=False
        )
        with torch.inference_mode():
            own = {first: logits_at(model.eval(), ids, first) for first in (0, far_position(config))}
        del model
        decoder = load(spec, part)
        offs = {first: difference(logits_of(decoder, ids, first), logits) for first, logits in own.items()}
    which = ", ".join(map(str, kept))
    for first, off in offs.items():
        if off > bound(first):
            raise UnsupportedModel(
                f"with its own layers {which} logits are off by {off:.2g} of their spread from position {first} on"
            )
    told = ", ".join(f"{off:.1g} from position {first} on" for first, off in offs.items())
    return f"with its own layers {which} logits are off by these shares of their spread: {told}"


def _cut(config: PreTrainedConfig, count: int) -> tuple[PreTrainedConfig, list[int]]:
    """The configuration of some first layers and the last one, and their places.

    As few first layers as make the last one be of its kind there; a model of few layers is whole.
    """
    layers = facts_of(config).layers
    for first in range(1, min(MOST_FIRST + 1, count)):
        kept = [*range(first), count - 1]
        lists = {
            name: [value[place] for place in kept]
            for name, value in config.to_dict().items()
            if isinstance(value, list) and len(value) == count
        }
        cut = type(config)(**(config.to_dict() | lists | {"num_hidden_layers": len(kept)}))
        if facts_of(cut).layers == tuple(layers[place] for place in kept):
            return cut, kept
    if count <= MOST_FIRST:
        return config, list(range(count))
    raise UnsupportedModel(f"no {MOST_FIRST} layers and the last one make a model of their own")


def _tensors(spec: ModelSpec, stored: list[StoredTensor], kept: list[int]) -> dict[str, Tensor]:
    """The tensors of the layers that are kept, by their names in a model of these, and of what is no layer."""
    found = {}
    for tensor in stored:
        match = _LAYER.match(llama_name(tensor.name, spec.renames)[0])
        if match is not None and int(match[1]) not in kept:
            continue
        name = tensor.name
        if match is not None:
            name = re.sub(rf"\.{match[1]}\.", f".{kept.index(int(match[1]))}.", name, count=1)
        rows = [rows.clone() for _, rows in tensor.runs(open_map(tensor.file), whole=True)]
        found[name] = rows[0] if len(rows) == 1 else torch.cat(rows)
    return found
