"""The division of a model's layers into pipeline stages, and the tensors that each stage reads."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from torch import nn

from kvern.errors import ConfigError
from kvern.models.checkpoint import StoredTensor
from kvern.models.decoder import Decoder
from kvern.models.share import of_whole
from kvern.ranks.stages import Stage
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import ModelSpec

LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def divide(outline: Decoder, stages: int) -> list[range]:
    """The places of each stage's layers, so that a step reads as few weights as possible where it reads most.

    Counted are the bytes of layers and output layer, and of a row of the embeddings. Each stage has a layer that keeps
    keys and values.
    """
    spec = outline.spec
    costs = [_nbytes(layer) for layer in outline.layers]
    row, head = _nbytes(outline.embed_tokens) // spec.vocab_size, _nbytes(outline.lm_head)
    return balanced(costs, row, head, stages, spec.caching_layers)


def balanced(costs: Sequence[int], before: int, behind: int, count: int, needed: Sequence[int]) -> list[range]:
    """Cut `costs` into `count` runs whose largest sum is as small as it can be, each with one of the `needed` places.

    The first run also takes what is `before` all, the last what is `behind`. Of equal cuts the earliest are taken.
    """
    sums = [*accumulate(costs, initial=0)]
    counts = [*accumulate((place in needed for place in range(len(costs))), initial=0)]
    best = {(0, 0): (0, 0)}  # (runs, places): (the largest sum, where the last run begins)
    for runs in range(1, count + 1):
        for stop in range(runs, len(costs) + 1):
            extra = before * (runs == 1) + behind * (runs == count)
            found = [
                (max(best[runs - 1, start][0], sums[stop] - sums[start] + extra), start)
                for start in range(runs - 1, stop)
                if (runs - 1, start) in best and counts[start] < counts[stop]
            ]
            if found:
                best[runs, stop] = min(found)
    cut, stop = [], len(costs)
    for runs in range(count, 0, -1):
        start = best[runs, stop][1]
        cut.append(range(start, stop))
        stop = start
    return cut[::-1]


def check_stages(spec: ModelSpec, stages: int) -> None:
    """Raises ConfigError for a model that cannot be divided into `stages` pipeline stages."""
    attentions = [mixer for layer in spec.layers for mixer in layer.mixers if isinstance(mixer, AttentionSpec)]
    parts = {
        "an encoder's layers": spec.encoder is not None,
        "layers that transformers computes": not spec.layers,
        "several residual streams": spec.additions.altup is not None,
        "inputs of each layer's own": spec.additions.per_layer is not None,
        "layers that attend to the keys and values of others": any(mixer.cache_of is not None for mixer in attentions),
    }
    for part in (part for part, is_there in parts.items() if is_there):
        raise ConfigError(
            f"pipeline_parallel_size is {stages}, and {spec.model_type} has {part}, which is not possible together "
            "yet: leave pipeline_parallel_size at 1"
        )
    if stages > (most := len(spec.caching_layers)):
        raise ConfigError(
            f"pipeline_parallel_size is {stages}, and {spec.model_type} has {most} layers that keep keys and values: "
            "lower it to that at most"
        )


def part_of_stage(spec: ModelSpec, stage: Stage) -> ModelSpec:
    """The model with the layers of a stage alone."""
    if stage.layers is None:
        return spec
    layers = spec.layers[stage.layers.start : stage.layers.stop]
    return replace(spec, layers=layers, renames=tuple(of_whole(rename, spec) for rename in spec.renames))


def tensors_of_stage(
    stored: Iterable[StoredTensor], names: Iterable[str], whole: ModelSpec, stage: Stage
) -> list[StoredTensor]:
    """The tensors that a stage needs; Llama's names of the tensors are `names`."""
    return [tensor for tensor, name in zip(stored, names, strict=True) if not _is_of_others(name, whole, stage)]


def _is_of_others(name: str, whole: ModelSpec, stage: Stage) -> bool:
    if stage.layers is None:
        return False
    layer = LAYER.match(name)
    if layer is not None:
        place = int(layer[1])
        return place < len(whole.layers) and place not in stage.layers
    if name.startswith("model.embed_tokens."):
        return not stage.has_embeddings(tied=whole.tie_word_embeddings)
    return not stage.is_last and name.startswith(("model.norm.", "lm_head."))


def _nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
