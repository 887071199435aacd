"""The kinds of steps that are captured as CUDA graphs; a new kind is registered here."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvern.drafting.device.drafter import StepReader
from kvern.runner.decode_graphs import DecodeKind
from kvern.runner.prompt_graphs import PromptKind
from kvern.runner.step_graphs import DeviceModel, StepKind
from kvern.runner.verify_graphs import VerifyKind


class GraphOptions(NamedTuple):
    """The steps that graphs are made for.

    max_tokens       the most tokens of a step
    shares_prefixes  attention reads common prefixes of decodes once
    drafts           steps may verify drafts
    verifies         steps that do are captured; their drafter can go on after graphs
    reader           reads steps within the graphs that verify drafts
    """

    max_tokens: int
    shares_prefixes: bool = True
    drafts: bool = False
    verifies: bool = True
    reader: StepReader | None = None


MakeKind = Callable[[DeviceModel, GraphOptions], StepKind[Any, Any] | None]
"""Makes a kind of step for a model; None: the model, or its backend of attention, cannot have it."""


def _decodes(model: DeviceModel, options: GraphOptions) -> DecodeKind:
    return DecodeKind(model, model.attention.prefix_members if options.shares_prefixes else 0)


def _prompts(model: DeviceModel, options: GraphOptions) -> PromptKind | None:
    is_possible = model.attention.reads_device_starts and not model.attention.deterministic
    return PromptKind(model, options.max_tokens) if is_possible and _is_one_stage(model) else None


def _verified_drafts(model: DeviceModel, options: GraphOptions) -> VerifyKind | None:
    if not (options.drafts and model.attention.reads_device_starts and _is_one_stage(model)):
        return None
    captures = options.verifies and model.decoder.build.ranks.dp_attention is None
    return VerifyKind(model, options.max_tokens, options.reader, captures=captures)


def _is_one_stage(model: DeviceModel) -> bool:
    """Returns whether the model is no pipeline stage: graphs receive rows of another stage for decodes alone."""
    return model.decoder.build.ranks.stage.count == 1


STEP_KINDS: list[MakeKind] = [_decodes, _verified_drafts, _prompts]
"""The kinds in the order in which they are tried for a step."""


def step_kinds(
    model: DeviceModel, options: GraphOptions, kinds: Iterable[MakeKind] | None = None
) -> list[StepKind[Any, Any]]:
    """The kinds of steps of a model whose backend of attention can be captured."""
    made = (make(model, options) for make in (STEP_KINDS if kinds is None else kinds))
    return [kind for kind in made if kind is not None]
