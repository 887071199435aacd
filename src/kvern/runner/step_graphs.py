"""Steps as CUDA graphs: captured one by one before anybody waits for them, and replayed.

    StepKind     describes one kind of step: the shapes of its graphs, what they read, and what they compute
    StepGraphs   captures and replays the graphs of a kind
    GraphMemory  is the memory that the graphs of several kinds share

    at start      the graphs that most steps need are captured, as many as a moment allows
    idle moments  the others, one at a time; an engine that has none (`LLM`) captures all of them at start
    in a step     none: a step whose graph is missing runs by a larger graph, or kernel by kernel

A new kind of step is a class in a file of its own, and an entry in `kernel_backend.STEP_KINDS`.
"""

import contextlib
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from kvern.device.device_batch import DeviceBatch, DeviceRows
from kvern.device.transfer import send
from kvern.drafting.device.drafter import Captures
from kvern.errors import ConfigError, in_a_line
from kvern.models.decoder import DeviceLanguageModel
from kvern.request.step import ScheduledTokens
from kvern.runner.cached_model import CachedModel, StepEmbeddings
from kvern.runner.device_states import DeviceStateMemory
from kvern.runner.needs import SamplingNeeds
from kvern.runner.result import PromptLogprobs

logger = logging.getLogger("kvern")

DeviceModel = CachedModel[DeviceLanguageModel, DeviceBatch, DeviceRows, DeviceStateMemory]
IN_GRAPHS = SamplingNeeds.FILTERS | SamplingNeeds.CONSTRAINTS | SamplingNeeds.LOGPROBS
"""The demands that graphs meet."""


class StepSize(NamedTuple):
    """The size of a step: tokens of decodes, and tokens of prompts."""

    decodes: int
    prompts: int

    @property
    def is_plain(self) -> bool:
        """Returns whether there are decodes alone."""
        return self.prompts == 0

    def fits_into(self, other: "StepSize") -> bool:
        """Returns whether there is room for this size in the other one."""
        return self.decodes <= other.decodes and self.prompts <= other.prompts


class PlannedStep(NamedTuple):
    """A step that is about to be computed, and what its graph is chosen by.

    scheduled   [R] the tokens of each request
    size        what a graph needs room for; in DP attention it is the size that all ranks agreed on; None: the step is
                not one of decodes and prompts alone, or there can be no graph for it
    needs       what sampling takes for all requests together
    adapted     some requests use adapters
    uncertain   only the device knows where some requests begin
    drafting    a drafter is asked to go on after the step
    is_read     this drafter reads the hidden states of the step
    embeddings  rows of embeddings for some of the tokens
    """

    scheduled: Sequence[ScheduledTokens]
    size: StepSize | None = None
    needs: int = SamplingNeeds.NOTHING
    adapted: bool = False
    uncertain: bool = False
    drafting: bool = False
    is_read: bool = False
    embeddings: StepEmbeddings | None = None


class StepOutputs(NamedTuple):
    """The results of a step on the device, good until the next step; None: there is no such result.

    hidden     [S, hidden]      the last hidden states of the tokens that are sampled from
    slots      [S] integers     their rows
    positions  [S] int64        the positions of the tokens to be sampled
    logits     [S, vocabulary]  scores of these tokens, in the model's dtype unless something scales them
    sampled    [S] int64        the tokens, with which the rows have gone on; None: they are not sampled yet
    starts     [R] int32        where the requests began, if only the device knows, or a drafter is told
    kept       [R] int64        how many of its tokens each request keeps
    reported                    what `kernels.logprobs` has written about the sampled tokens
    prompts                     log-probabilities of prompt tokens
    told       [T, ...]         hidden states for the drafter
    is_read                     a `StepReader` has read the step
    """

    hidden: Tensor | None = None
    slots: Tensor | None = None
    positions: Tensor | None = None
    logits: Tensor | None = None
    sampled: Tensor | None = None
    starts: Tensor | None = None
    kept: Tensor | None = None
    reported: Sequence[Tensor] | None = None
    prompts: PromptLogprobs | None = None
    told: Tensor | None = None
    is_read: bool = False

    def unowned(self) -> "StepOutputs":
        """These outputs, whose large tensors other graphs may overwrite."""
        hidden, logits = self.hidden, self.logits
        return self._replace(
            hidden=None if hidden is None else unowned(hidden), logits=None if logits is None else unowned(logits)
        )

    def unsampled(self, decoder: DeviceLanguageModel, count: int) -> "StepOutputs":
        """The first `count` rows, for sampling that takes more than the graph did; `logits` are a rank's own part."""
        assert self.hidden is not None and self.slots is not None
        assert self.positions is not None and self.logits is not None
        logits = decoder.whole_logits(self.logits[:count])
        return StepOutputs(self.hidden[:count], self.slots[:count], self.positions[:count], logits)


class GraphInputs:
    """Numbers [N] int32 that graphs read, and those of them that the host knows: the first ones, or none."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers
        self.known: Sequence[int] = ()

    def write(self, known: Sequence[int]) -> None:
        """Let the first numbers be these; nothing is sent if they are."""
        if known != self.known:
            self.send(np.array(known, dtype=np.int32))
            self.known = known

    def send(self, numbers: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> None:
        """Let the first numbers be these."""
        self.numbers[: len(numbers)].copy_(send(numbers, self.numbers.device))


Shape = TypeVar("Shape", bound=Hashable)
Inputs = TypeVar("Inputs", bound=GraphInputs)


class Priority(IntEnum):
    """The order in which kinds of graphs are captured."""

    MOST_STEPS = 0
    DRAFTS_VERIFIED = 1
    DRAFTS_MADE = 2
    PROMPTS = 3
    FEW_STEPS = 4


class StepKind(ABC, Generic[Shape, Inputs]):
    """One kind of step.

    shapes            the shapes of all its graphs, the likeliest first; among like ones the largest first, in whose
                      memory the others find place
    takes_embeddings  `run` takes steps with rows of embeddings
    """

    shapes: Sequence[Shape]
    takes_embeddings = False

    @abstractmethod
    def inputs(self, shape: Shape) -> Inputs:
        """The inputs of the graph of a shape, for a step of rows that pad alone."""

    @abstractmethod
    def compute(self, shape: Shape, inputs: Inputs) -> StepOutputs:
        """Compute the step, kernel by kernel: this is what is captured. It may not wait for the device."""

    @abstractmethod
    def priority(self, shape: Shape) -> Priority:
        """When the graph of a shape is captured."""

    def run(self, step: PlannedStep, captured: "Mapping[Shape, StepGraph[Shape, Inputs]]") -> StepOutputs | None:
        """Start a step of the model by one of the graphs that are `captured`; None: none fits, and nothing was changed.

        Kinds of drafters, which are no steps of the model, take none.
        """
        return None

    def largest_step(self) -> list[ScheduledTokens]:
        """A step of the model that takes as much memory, kernel by kernel, as the largest graph; empty: none does."""
        return []

    def forget_inputs(self, captured: "Collection[StepGraph[Shape, Inputs]]") -> None:
        """A step has failed: what graphs read is not known."""
        for graph in captured:
            graph.inputs.known = ()


@dataclass(frozen=True)
class StepGraph(Generic[Shape, Inputs]):
    """A captured step: `replay` reads `inputs`, and writes `outputs`."""

    shape: Shape
    inputs: Inputs
    outputs: StepOutputs
    replay: Callable[[], None]


class StepGraphs(Generic[Shape, Inputs]):
    """The graphs of one kind of step."""

    def __init__(self, kind: StepKind[Shape, Inputs], memory: "CaptureMemory") -> None:
        self.kind, self._memory = kind, memory
        self.missing: deque[Any] = deque(kind.shapes)
        """Shapes that are not captured yet."""
        self.captured: dict[Shape, StepGraph[Shape, Inputs]] = {}

    @property
    def priority(self) -> Priority:
        """The priority of the next graph that is missing."""
        return self.kind.priority(self.missing[0])

    def capture_next(self) -> None:
        """Capture the next graph that is missing."""
        shape = self.missing.popleft()
        inputs = self.kind.inputs(shape)
        replay, outputs = self._memory.capture(partial(self.kind.compute, shape, inputs))
        self.captured[shape] = StepGraph(shape, inputs, outputs, replay)

    def run(
        self, step: PlannedStep, captured: Mapping[Shape, StepGraph[Shape, Inputs]] | None = None
    ) -> StepOutputs | None:
        """Start a step as `StepKind.run`, by the graphs that are captured so far, or others in their places."""
        return self.kind.run(step, self.captured if captured is None else captured)


class CaptureMemory(Protocol):
    """The protocol of what captures steps."""

    def capture(self, step: Callable[[], StepOutputs]) -> tuple[Callable[[], None], StepOutputs]:
        """Capture a step; returns the function that computes it again, and the outputs that this overwrites."""


class GraphMemory:
    """Memory of CUDA graphs of a device. They share it, since no graph runs beside another."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, step: Callable[[], StepOutputs]) -> tuple[Callable[[], None], StepOutputs]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Not torch.cuda.graph, which waits for the device and gives all unused memory back, for the next steps to
            # ask for anew. Relaxed: a library may load a kernel at its first launch.
            graph.capture_begin(self._pool, capture_error_mode="relaxed")
            try:
                outputs = step()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error says what went wrong
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay, outputs.unowned()


class _Memory:
    """The bytes of a tensor, without a hold on them."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "version": 2,
        }


def unowned(tensor: Tensor) -> Tensor:
    """A view of a tensor in memory of a graph, which other graphs may overwrite."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)


def capture_one(graphs: Sequence[Captures], *, is_alone: bool) -> bool:
    """Capture the graph that is waited for most; returns whether there are more.

    Where there is no memory for a graph, steps run without it and those of its kind that are missing. `is_alone`: no
    other rank runs the same steps. Raises as `give_up`.
    """
    waiting = [each for each in graphs if each.missing]
    if not waiting:
        return False
    first = min(waiting, key=lambda each: each.priority)
    try:
        first.capture_next()
    except RuntimeError as error:
        give_up(first.missing, error, is_alone=is_alone)
    return any(each.missing for each in waiting)


def give_up(missing: deque[Any], error: RuntimeError, *, is_alone: bool) -> None:
    """Leave out the graphs that are `missing`, since the capture of the one before had no GPU memory.

    Raises any other error, and ConfigError on one of several ranks: others have them, and would run other steps.
    """
    if not lacks_memory(error):
        raise error
    count = 1 + len(missing)
    if not is_alone:
        raise ConfigError(
            f"no GPU memory for {count} CUDA graphs of this rank, which the others may have: lower max_batch_requests "
            f"or gpu_memory_share, or set cuda_graphs to false ({in_a_line(error)})"
        ) from error
    logger.warning("no GPU memory for %d CUDA graphs: such steps run slower; %s", count, in_a_line(error))
    missing.clear()
    torch.cuda.empty_cache()


def lacks_memory(error: RuntimeError) -> bool:
    """Returns whether there was no GPU memory, as PyTorch, the driver or cuBLAS says it."""
    said = "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in said)
