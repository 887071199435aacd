"""A model that transformers computes, as a `LanguageModel`: flat runs of tokens, attention over a paged cache."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import logging as transformers_logging
from transformers.modeling_outputs import MoeModelOutputWithPast

from kvern.errors import CorruptCheckpoint, in_a_line
from kvern.layers.build import Build
from kvern.layers.states import StepStates
from kvern.layers.step_context import NO_ADAPTERS, Attend, StepAdapters, StepContext
from kvern.models.decoder import LayerInputs
from kvern.models.fallback.attention import IMPLEMENTATION, Call, PagedAnswer, answered
from kvern.models.fallback.description import read_config
from kvern.models.fallback.spec import TransformersSpec
from kvern.models.fallback.swap import Swaps
from kvern.models.loader import LoadOptions

SHOWN = 5
PLAIN = LoadOptions()


class TransformersDecoder:
    """`model` is loaded, and calls the attention of `IMPLEMENTATION`; kvern computes the parts in `swaps`.

    build     the options of these parts; the model's device and dtype are those here, as swapped parts leave empty
              tensors behind in `model`
    captures  as of a `DeviceLanguageModel`
    """

    def __init__(self, spec: TransformersSpec, model: PreTrainedModel, swaps: Swaps, build: Build) -> None:
        self.spec = spec
        self.model = model
        self.swaps = swaps
        self.build = build
        self.captures = False
        self._body = model.base_model
        self._head = self._without_body()

    def __str__(self) -> str:
        parts = ", ".join(["attention", *self.swaps.kinds])
        return f"transformers runs {self.spec.model_type}, whose {parts} kvern computes"

    def _without_body(self) -> PreTrainedModel:
        """The model with the same weights, whose body hands on the states that it is given."""
        head = copy.copy(self.model)
        head._modules = {**self.model._modules, self.model.base_model_prefix: _GivenStates()}
        return head

    def settle(self, kinds: list[str]) -> None:
        """Leaves these kinds of parts to kvern, and gives all others back to transformers."""
        self.swaps.settle(kinds)
        self._head = self._without_body()

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        adapters: StepAdapters = NO_ADAPTERS,
        states: StepStates | None = None,
        inputs: LayerInputs | None = None,
    ) -> Tensor:
        """Computes a step like `Decoder.forward`, without adapters, recurrent states and layer inputs."""
        with answered(PagedAnswer(self.spec.calls, attend)):
            out = self._body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden if wanted is None else hidden.index_select(0, wanted)

    def entry(self, token_ids: Tensor) -> Tensor:
        """The tokens themselves, which the model embeds."""
        return token_ids

    @property
    def lm_head(self) -> nn.Module | None:
        """The module that scores the vocabulary."""
        head: nn.Module | None = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        return head

    def looked_up(self, token_ids: Tensor) -> None:
        """There is no table of layer inputs."""

    def run(self, hidden: Tensor, step: StepContext, looked_up: Tensor | None = None) -> Tensor:
        """Computes a step like `Decoder.run`, from the tokens that `entry` returned."""
        return self(hidden, step.rotation.sine, step.attend, step.wanted)

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Scores as `logits` without `upcast`: there is one rank."""
        return self.logits(hidden, upcast=False)

    def whole_logits(self, own: Tensor) -> Tensor:
        """Logits of the whole vocabulary, which `own` are."""
        return own

    def logits(self, hidden: Tensor, *, upcast: bool = True) -> Tensor:
        """Score the vocabulary: `hidden [N, hidden]` -> `[N, vocab]`, float32 if `upcast`."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float() if upcast else logits

    @property
    def sinks(self) -> Mapping[int, Tensor]:
        """See `Decoder.sinks`: the sinks that a forward pass of one token uses."""
        found: list[Tensor | None] = []

        def note(call: Call) -> Tensor:
            found.append(call.sinks)
            return call.unanswered()

        token = torch.zeros(1, 1, dtype=torch.int64, device=self.build.device)
        with torch.inference_mode(), answered(note):
            self._body(input_ids=token, position_ids=token, use_cache=False)
        return {index: sinks.detach().float() for index, sinks in enumerate(found) if sinks is not None}

    def unattended(self, tokens: int) -> Tensor:
        """Logits of so many tokens 0, in whose layers nothing attends: what remains of a step is the model's own."""
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=self.build.device)
        with torch.inference_mode(), answered(Call.unanswered):
            return self.logits(self._body(input_ids=ids, position_ids=ids, use_cache=False).last_hidden_state[0])

    def plain_logits(self, token_ids: Tensor) -> Tensor:
        """Logits of one prompt `[T]` without kvern's attention and parts: float32 `[T, vocab]`.

        Products with quantized weights are kvern's, if these are switched on: what is multiplied by some of them is
        rounded as well.
        """
        self.model.set_attn_implementation("eager")
        try:
            with self.swaps.only([kind for kind in self.swaps.needed if kind in self.swaps.kinds]):
                logits: Tensor = self.model(input_ids=token_ids[None], use_cache=False).logits[0].float()
        finally:
            self.model.set_attn_implementation(IMPLEMENTATION)
        return logits


class _GivenStates(nn.Module):
    """A replacement of a model's body that returns the given embeddings as states, for the use of its head alone."""

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> "_States":
        return _States(last_hidden_state=inputs_embeds)


@dataclass
class _States(MoeModelOutputWithPast):
    """The result of a model's body; heads read the states only."""

    cross_attentions: None = None


def load_fallback(
    folder: Path, spec: TransformersSpec, dtype: torch.dtype, options: LoadOptions = PLAIN
) -> TransformersDecoder:
    """Load the model of a folder from its safetensors files; no code in the folder is run.

    `options`: `device`, `load_format`, `kernels`, `unquantized`, `quantization` and `int8_head`, the last four for the
    parts that kvern computes. Raises CorruptCheckpoint or ConfigError.
    """
    model = _loaded(folder, dtype, dummy=options.load_format == "dummy")
    move: Any = model.to  # which transformers wraps
    move(options.device)
    build = Build(dtype, model.device, spec.max_position_embeddings, options.kernels)
    swaps = Swaps(model, build, options.unquantized, options.quantization, options.int8_head)
    return TransformersDecoder(spec, model, swaps, build)


def _loaded(folder: Path, dtype: torch.dtype, *, dummy: bool) -> PreTrainedModel:
    """The model as transformers makes it."""
    config = read_config(folder)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": IMPLEMENTATION, "trust_remote_code": False}
    if dummy:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            random: Any = AutoModelForCausalLM.from_config(config, **options)  # type: ignore[no-untyped-call]
        filled: PreTrainedModel = random.eval()
        return filled
    options |= {"config": config, "local_files_only": True, "use_safetensors": True}
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"transformers cannot load the weights in {folder}: {in_a_line(error)}") from error
    found: Any
    model, found = loaded
    for kind in ("missing", "unexpected", "mismatched"):
        if names := sorted(str(item) if isinstance(item, str) else item[0] for item in found[f"{kind}_keys"]):
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise CorruptCheckpoint(
                f"weights in {folder} do not fit config.json: {len(names)} {kind}: {', '.join(names[:SHOWN])}{more}"
            )
    whole: PreTrainedModel = model.eval()
    return whole


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses transformers' progress bars and loading reports."""
    shown, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
