"""Drafters whose batch lives on a GPU: how one is made of a draft model or head, and what memory it takes."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kvern.attention.base import AttentionBackend
from kvern.config import EngineConfig
from kvern.device.device_batch import DeviceBatch, DeviceRows, build_device_batch
from kvern.drafting.device.device_draft_model import DeviceDraftModel
from kvern.drafting.device.draft_graphs import MOST_ROWS, DraftGraphs, ModelSteps, draft_runs, padded_rows
from kvern.drafting.device.drafter import Drafter
from kvern.drafting.device.head_drafter import HeadDrafter
from kvern.drafting.device.head_graphs import DeviceHead, HeadGraphs
from kvern.drafting.device.medusa_drafter import MedusaDrafter
from kvern.drafting.models.head import DraftHead
from kvern.drafting.models.medusa_heads import MedusaHeads
from kvern.drafting.rejection import Drawn
from kvern.kernels.batch import write_sampled
from kvern.kernels.sampling import sample
from kvern.models.decoder import Decoder
from kvern.request.step import ScheduledTokens
from kvern.runner.cached_model import CachedModel
from kvern.runner.memory import bytes_of_drafting, bytes_of_reading
from kvern.runner.plan import Plan
from kvern.runner.prompt_graphs import PromptKind, reading_shapes
from kvern.runner.step_graphs import DeviceModel, GraphMemory, StepGraphs


def medusa_drafter(heads: MedusaHeads, rows: DeviceRows, drawn: Drawn | None) -> MedusaDrafter:
    """Medusa heads as a drafter over the rows of a model. `drawn`: as of `Drafter`s that draw."""
    return MedusaDrafter(heads, rows, partial(_draw, rows), drawn)


def make_drafter(
    decoder: Decoder | DraftHead,
    attention: AttentionBackend[DeviceBatch],
    rows: DeviceRows,
    block_size: int,
    max_tokens: int,
    *,
    drawn: Drawn | None,
    cuda_graphs: bool,
) -> Drafter:
    """A draft model or head as a drafter over the rows of a model, with a cache of its own.

    `max_tokens`: of a step that reads prompts. `cuda_graphs`: it drafts in graphs, unless what it draws from is kept.
    """
    captures = drawn is None and cuda_graphs and attention.captures and rows.device.type == "cuda"
    if isinstance(decoder, DraftHead):
        head: DeviceHead = CachedModel(decoder, attention, rows, block_size)
        in_graphs = HeadGraphs(head, GraphMemory(rows.device)) if captures else None
        return HeadDrafter(head, partial(_build_batch, rows, block_size), partial(_draw, rows), in_graphs, drawn=drawn)
    model: DeviceModel = CachedModel(decoder, attention, rows, block_size)
    if not captures:
        return DeviceDraftModel(model, max_tokens, drawn=drawn)
    memory = GraphMemory(rows.device)
    drafts, prompts = DraftGraphs(ModelSteps(model), rows, memory), None
    if attention.reads_device_starts and not attention.deterministic:
        prompts = StepGraphs(PromptKind(model, max_tokens, samples=False), memory)
    return DeviceDraftModel(model, max_tokens, drafts, prompts)


def drafting_bytes(draft: Decoder | DraftHead | MedusaHeads, config: EngineConfig, plan: Plan) -> int:
    """Bytes that the steps of a draft model or head take beside those of the model."""
    rows = padded_rows(min(plan.max_batch_requests, MOST_ROWS))
    captured = config.cuda_graphs and not isinstance(draft, MedusaHeads)
    steps = sum(run.steps for run in draft_runs(rows)) if captured else 0
    drawn = MOST_ROWS if config.acceptance == "rejection" else 0
    size = getattr(torch, plan.dtype).itemsize
    taken = bytes_of_drafting(draft.spec, size, rows, steps, drawn)
    if captured and isinstance(draft, Decoder):
        reading = reading_shapes(plan.max_batch_tokens, plan.max_model_len)
        taken += bytes_of_reading(draft.spec, size, [shape.prompts for shape in reading])
    if isinstance(draft, DraftHead) and draft.layer_inputs() is not None:
        taken += 2 * plan.max_batch_tokens * draft.head.state_size * size  # of two steps, kept and joined
    return taken


def _build_batch(
    rows: DeviceRows, block_size: int, scheduled: Sequence[ScheduledTokens], starts: Tensor
) -> DeviceBatch:
    return build_device_batch(rows, scheduled, block_size, starts)


def _draw(rows: DeviceRows, logits: Tensor, slots: Sequence[int], index: Tensor, positions: Tensor) -> None:
    write_sampled(rows.tokens, index, positions, sample(logits, None, index, positions, rows))
