"""The attributes that LLM and AsyncLLM share."""

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvern.config import EngineConfig
from kvern.engine.embedding import check_embeds, embedding_of
from kvern.engine.inputs import InputProcessor, Messages
from kvern.errors import InvalidRequest
from kvern.plugins import imported
from kvern.request.python_names import missing
from kvern.request.sampling_params import SamplingParams
from kvern.serving.chats import Tools
from kvern.text.tokenizer import Tokenizer
from kvern.tools.chat import PromptOptions

if TYPE_CHECKING:
    from kvern.engine.labels import Labels
    from kvern.spec.model import ModelSpec


class PythonApi(ABC):
    """A model of a Python program: what it is, and how prompts and answers are read."""

    _namespace = b""
    """The namespace of all requests: others' cached blocks are not used."""

    @property
    @abstractmethod
    def config(self) -> EngineConfig:
        """The options that this was made with."""

    @property
    @abstractmethod
    def spec(self) -> "ModelSpec":
        """The model's description."""

    @property
    @abstractmethod
    def _inputs(self) -> InputProcessor: ...

    @property
    @abstractmethod
    def _folder(self) -> Path: ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._inputs.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, under the name that vLLM has for it."""
        return self.tokenizer

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its answer."""
        return self._inputs.max_model_len

    @property
    def reads_images(self) -> bool:
        """True if conversations may have images."""
        return self._inputs.model.reads_images

    def chat_prompt(self, messages: Messages, tools: Tools = None, add_generation_prompt: bool = True) -> list[int]:
        """The conversation as token ids, by the model's chat template. Raises InvalidRequest."""
        options = PromptOptions(add_generation_prompt=add_generation_prompt)
        encode = functools.partial(self.tokenizer.encode, add_special_tokens=False)
        return self._inputs.chat.token_ids(messages, tools, options, encode)

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters that take the model's recommendations, as all do that name no others."""
        return SamplingParams()

    def reset_prefix_cache(self) -> bool:
        """Use nothing that earlier requests have cached, as a benchmark may want. Always true."""
        self._namespace = os.urandom(16)
        return True

    @property
    def _name(self) -> str:
        return self.config.model or self._folder.name

    def _check_embeds(self) -> None:
        check_embeds(self._inputs.model, self._folder, self._name)

    def _labels(self) -> "Labels":
        found: Labels = imported("kvern.engine.labels:labels_of")(self._folder, self._name)
        return found

    def _encoded(self, states: Sequence[bytes], pooling_task: str) -> list[list[float]]:
        """The vectors of `encode`. Raises InvalidRequest."""
        if pooling_task == "classify":
            labels = self._labels()
            return [list(labels.probabilities(state).values()) for state in states]
        if pooling_task != "embed":
            raise InvalidRequest(f"pooling_task is {pooling_task!r}: embed and classify are supported")
        self._check_embeds()
        return [embedding_of(state) for state in states]

    if not TYPE_CHECKING:  # a checker knows the names that there are

        def __getattr__(self, name: str) -> Any:
            raise missing(type(self).__name__, name)
