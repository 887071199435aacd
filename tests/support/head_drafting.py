"""Engines that draft with heads (EAGLE, EAGLE-3, Medusa, prediction layers), and reference drafts of these heads."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from kvern import LLM
from kvern.drafting.device.drafter import ComputedStep
from kvern.drafting.drafting import Drafting
from kvern.drafting.models.head import DraftHead
from kvern.drafting.room import Wanted
from kvern.layers.states import new_states
from kvern.models.decoder import Decoder, LayerInputs
from tests.support.draft_heads import (
    Weights,
    add_prediction,
    eagle3_enter,
    eagle3_logits,
    eagle3_states,
    medusa_logits,
    write_eagle,
    write_medusa,
)
from tests.support.families import make_checkpoint
from tests.support.internals import core_of, vocab_size_of
from tests.support.model_outputs import PROMPT, DenseAttend
from tests.support.tiny_model import make_tiny_model

TOKENS = torch.tensor(PROMPT)


def states_of(decoder: Decoder, entries: tuple[int, ...] = (), tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """The last hidden states of a text, or the inputs of some layers."""
    attend, inputs = DenseAttend(decoder), LayerInputs(entries, decoder.build)
    states = new_states(decoder.spec.recurrent, [len(tokens)], decoder.build.dtype, decoder.build.device)
    last = decoder(tokens, torch.arange(len(tokens)), attend, states=states, inputs=inputs)
    return inputs.rows() if entries else last


def drafted(head: DraftHead, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The head's states of the prompt without its first token, and their logits."""
    attend = DenseAttend(cast("Decoder", SimpleNamespace(spec=head.spec, sinks={})))
    following = head(TOKENS[1:], head.enter(states[:-1]), torch.arange(len(TOKENS) - 1), attend)
    return following, head.logits(following)


PROMPTS = [[5, 9, 17, 33, 2, 81], [7, 9, 17, 33, 2, 80, *range(40, 90)], [100] * 10]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "max_model_len": 128,
    "kv_cache_tokens": 512,
    "block_size": 4,
    "max_batch_tokens": 16,
}
Drafted = list[tuple[list[int], list[int]]]


class Always(Drafting):
    """Drafting with `most` tokens on the device, whether accepted or not; none for the first `outputs` tokens."""

    def __init__(self, vocab_size: int, most: int, outputs: int = 0) -> None:
        super().__init__(None, vocab_size)
        self._most, self._outputs = most, outputs

    def wanted(self, running: int) -> Wanted | None:
        return lambda request: 0 if request.output_length < self._outputs else self._most


@contextmanager
def drafting(llm: LLM, most: int, outputs: int = 0) -> Iterator[Drafted]:
    """Lets the head draft as in `Always`; yields the texts, and the drafts after each."""
    core, found = core_of(llm), Drafted()
    core.drafting = Always(vocab_size_of(llm), most, outputs)
    guarded = core.executor._worker.runner._drafter
    drafter = guarded._drafter
    draft, rows = drafter.draft, drafter._rows

    def noted(step: ComputedStep) -> None:
        draft(step)
        for item in step.scheduled:
            if item.sampled and item.guesses:
                newest, row = int(rows.num_computed_tokens[item.slot]), rows.tokens[item.slot].tolist()
                found.append((row[: newest + 1], row[newest + 1 : newest + 1 + item.guesses]))

    drafter.draft = noted
    yield found
    assert guarded._drafter is drafter, "it failed"


def eagle3_drafts(decoder: Decoder, weights: Weights, config: dict[str, Any], text: list[int], count: int) -> list[int]:
    """The drafts of an EAGLE-3 head after a text, computed for all tokens at once."""
    tokens = torch.tensor(text)
    inputs = states_of(decoder, (2, 1, 0), tokens)[:-1]
    states, drafts = eagle3_enter(weights, config, inputs), list[int]()
    for _ in range(count):
        last = eagle3_states(weights, config, decoder.embed_tokens(tokens[1:]), states)[-1:]
        drafts.append(int(eagle3_logits(weights, config, last).argmax()))
        tokens, states = torch.cat((tokens, torch.tensor(drafts[-1:]))), torch.cat((states, last))
    return drafts


def make_model_with_layer(family: str, folder: Path) -> Path:
    """A model of the tiny model's tokens that predicts several."""
    make_tiny_model(folder)
    (folder / "model.safetensors").unlink()
    make_checkpoint(family, folder, vocab_size=288)
    changes = {"mlp_layer_types": ["sparse"]} if family == "glm4_moe_lite" else {"first_k_dense_replace": 0}
    add_prediction(folder, family, "deepseek", vocab_size=288, num_hidden_layers=1, **changes)
    return folder


MEDUSA_FILE = "medusa_lm_head.safetensors"


def medusa_drafts(decoder: Decoder, weights: Weights, text: list[int], count: int) -> list[int]:
    """The most probable tokens of the first Medusa heads after a text, computed for all tokens at once."""
    last = states_of(decoder, tokens=torch.tensor(text[:-1]))[-1:]
    return medusa_logits(weights, last, decoder.spec.vocab_size)[0, :count].argmax(-1).tolist()


HEAD_KINDS = ["eagle", "eagle3", "medusa"]


def write_head(kind: str, folder: Path, target: Path) -> None:
    if kind == "medusa":
        write_medusa(folder, target, drafted=41)
    else:
        write_eagle(folder, target, drafted=41 if kind == "eagle3" else None)
