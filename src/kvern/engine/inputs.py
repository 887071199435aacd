"""From what users send to requests that the engine can run: tokenize, validate, fill in defaults.

Everything that can be wrong with a request is found here, before it reaches the engine.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from kvern.config import EngineConfig
from kvern.errors import InvalidParameter, InvalidRequest, PromptTooLong, shown
from kvern.models.image_models import vision_in
from kvern.request.request import NO_OPTIONS, PromptInput, RequestOptions, RequestSpec
from kvern.request.sampling_params import USUAL, ResolvedParams, SamplingParams, check_wide_integer
from kvern.spec.facts import ModelFacts
from kvern.structured.grammar import grammars_of
from kvern.text.tokenizer import Tokenizer, read_json
from kvern.tools.chat import Chat
from kvern.tools.encoding import LONGEST_TRUNCATED

if TYPE_CHECKING:
    from kvern.engine.breakers import BreakerFinder
    from kvern.images.embedded import PictureReader
    from kvern.images.prompt import ImageReader
    from kvern.sample.processors import Processors

Prompt = str | Sequence[int] | PromptInput
Messages = Sequence[Mapping[str, Any]]

ONE_INPUT = "an embedding is of one text or of one image; send each as an input of its own"
LONGEST_DIGEST = 64
"""Bytes that name the content behind a token."""
MOST_AT_ONCE = 4096
"""The most token ids of a prompt that an event loop checks itself: in about 0.1 ms."""
EMBEDDING = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=1)
"""The token that is sampled beside a hidden state means nothing."""


class RequestLimits(NamedTuple):
    """An engine's limits of one request: tokens of prompt and answer together, and the beams of a search."""

    max_model_len: int
    max_batch_requests: int


class InputProcessor:
    """Makes requests for one model.

    `chat` makes requests of conversations. With `grammars_apart` other processes compile the grammars that NotCompiled
    asks for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: ModelFacts,
        folder: Path,
        limits: RequestLimits,
        config: EngineConfig,
        processors: "Processors",
        grammars_apart: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self._processors = processors
        self.max_model_len = limits.max_model_len
        self.vocab_size = model.vocab_size
        self._token_ids = list[Annotated[int, msgspec.Meta(ge=0, lt=model.vocab_size)]]
        self.model = model
        self._images_in_prompts = model.reads_images and not model.is_encoder
        self._refusal = _refusal(model)
        self._eos_token_ids = frozenset(token for token in tokenizer.eos_token_ids if token < model.vocab_size)
        self.grammars = grammars_of(folder, model.vocab_size, grammars_apart)
        self._defaults = _generation_defaults(folder)
        self._folder = folder
        self.chat = Chat(
            tokenizer,
            self.grammars,
            config.tool_parser,
            config.reasoning_parser,
            limits.max_model_len,
            self._refusal,
            (lambda: self.images) if self._images_in_prompts else _unread(folder),
        )
        self.chat.warn_of_template()
        self._seed = config.seed
        self._max_batch_requests = limits.max_batch_requests
        self._count = itertools.count(1)  # threads make requests at the same time

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions = NO_OPTIONS,
    ) -> RequestSpec:
        """Returns the request of a prompt, checked and with all defaults filled in.

        Raises InvalidRequest, InvalidParameter or NotCompiled.
        """
        if not options.embed:
            self.check_generates()
        check_wide_integer("priority", options.priority)
        asked = EMBEDDING if options.embed else params or SamplingParams()
        resolved = self._resolve(asked)
        grammar = None if asked.structured is None else self.grammars.compile(asked.structured)
        read = self._prompt(prompt)
        stop = frozenset(asked.stop_token_ids or ()) | (frozenset() if asked.ignore_eos else self._eos_token_ids)
        predicted = self._predicted(options.prediction)
        if predicted and asked.beam_width is not None:
            raise InvalidRequest(
                f"prediction is given with beam_width {asked.beam_width}: at every token beams are chosen among "
                "others, which nobody can predict; leave one out"
            )
        count = next(self._count)
        bad_word_ids = self._bad_word_ids(asked)
        _check_that_something_can_be_sampled(asked, stop, bad_word_ids)
        return RequestSpec(
            request_id,
            read,
            resolved if grammar is None else resolved.replace(structured=None),  # the grammar says it
            max_tokens=min(asked.max_tokens or self.max_model_len, max(0, self.max_model_len - len(read))),
            seed=asked.seed
            if asked.seed is not None
            else hash((self._seed, count)),  # of integers: the same everywhere
            stop_token_ids=stop,
            bad_word_ids=bad_word_ids,
            breakers=self._breakers(asked.dry_sequence_breakers) if asked.penalizes_repetitions else None,
            grammar=grammar,
            predicted=predicted,
            **msgspec.structs.asdict(msgspec.structs.replace(options, prediction="")),
        )

    @functools.cached_property
    def _breakers(self) -> "BreakerFinder":
        from kvern.engine.breakers import BreakerFinder

        return BreakerFinder(self.tokenizer, self.vocab_size)

    def check_generates(self) -> None:
        """Raises InvalidRequest for a model that generates no text."""
        if self._refusal is not None:
            raise InvalidRequest(self._refusal)

    def pair(self, first: str, second: str) -> PromptInput:
        """Two texts for an encoder that reads them together. Raises InvalidRequest."""
        for text in (first, second):
            self.tokenizer.check_length(text, max(self.max_model_len, LONGEST_TRUNCATED))
        token_ids, kinds = self.tokenizer.encode_pair(first, second)
        return PromptInput(token_ids, second_text=kinds.index(1) if 1 in kinds else None)

    def _prompt(self, prompt: Prompt) -> PromptInput:
        if isinstance(prompt, str):
            read = PromptInput(self.tokenizer.encode(prompt, most_tokens=self.max_model_len))
        elif isinstance(prompt, PromptInput):
            read = msgspec.structs.replace(prompt, token_ids=as_list(prompt.token_ids))
        else:
            read = PromptInput(as_list(prompt))
        if read.attachments and self.model.is_encoder and self.model.reads_images:
            return self._embedder.checked(read)
        self._check_tokens(read.token_ids, len(read.attachments))
        _check_contents(read, self.model)
        if len(read) < self.model.padded:
            return self._padded(read)
        return self._checked_spans(self.images.checked(read)) if self._images_in_prompts else read

    def _padded(self, prompt: PromptInput) -> PromptInput:
        """A text of the length that all have. Raises InvalidRequest."""
        token = self.tokenizer.pad_token_id
        if token is None or token >= self.vocab_size:
            raise InvalidRequest(
                f"{self.model.model_type} pads texts to {self.model.padded} tokens by pad_token, which its tokenizer "
                f"lacks: add it to tokenizer_config.json, or send {self.model.padded} token ids"
            )
        missing = self.model.padded - len(prompt)
        return msgspec.structs.replace(prompt, token_ids=[*prompt.token_ids, *[token] * missing])

    def _checked_spans(self, prompt: PromptInput) -> PromptInput:
        """The prompt, whose spans fit a step. Raises InvalidRequest."""
        longest = max((end - first for first, end in prompt.spans), default=0)
        if longest > self.model.longest_span:
            raise InvalidRequest(
                f"an image of the prompt has {longest} tokens, which see each other, and a step computes "
                f"{self.model.longest_span} at most: raise max_batch_tokens"
            )
        return prompt

    def picture(self, part: Mapping[str, Any], place: str) -> PromptInput:
        """An image, for an encoder that reads images. `part` has it as a part of a message does, `place` names it.

        Raises InvalidRequest.
        """
        if not self.model.reads_images:
            raise InvalidRequest(f"{place} is an image: {self.model.model_type} reads texts alone; leave it out")
        if not self.model.is_encoder:
            raise InvalidRequest(f"{place} is an image: alone it is no prompt for this model; send a conversation")
        return self._embedder.prompt(part, place)

    @functools.cached_property
    def _embedder(self) -> "PictureReader":
        from kvern.images.embedded import PictureReader

        spec = vision_in(self._folder, read_json(self._folder / "config.json"))
        assert spec is not None, "the model reads no images"
        return PictureReader.of(self._folder, spec)

    def with_images(self, text: str | list[int], media: Mapping[str, Any]) -> PromptInput:
        """A prompt with images at its placeholders, as vLLM has it. Raises InvalidRequest."""
        if not isinstance(media, Mapping) or media.keys() - {"image"} or not self.model.reads_images:
            reads = '{"image": IMAGE or IMAGES}' if self.model.reads_images else "nothing: this model reads text only"
            names = ", ".join(map(str, media)) if isinstance(media, Mapping) else shown(media)
            raise InvalidRequest(f"multi_modal_data has {names}: it may have {reads}")
        images = media.get("image") or []
        several = images if isinstance(images, list | tuple) else [images]
        if self.model.is_encoder:
            if len(several) != 1 or text:
                raise InvalidRequest(f"a prompt has {len(several)} images{' and a text' if text else ''}: {ONE_INPUT}")
            return self.picture({"image": several[0]}, "image 0")
        if isinstance(text, str):
            text = self.tokenizer.encode(self.images.placed(text), most_tokens=self.max_model_len)
        files = [self.images.read({"image": image}, f"image {number}") for number, image in enumerate(several)]
        return self.images.prompt(text, files)

    @functools.cached_property
    def images(self) -> "ImageReader":
        """The reader of images of prompts, for a model that has one. Raises UnsupportedModel."""
        from kvern.images.prompt import ImageReader

        spec = vision_in(self._folder, read_json(self._folder / "config.json"))
        assert spec is not None, "the model reads no images"
        return ImageReader.of(self._folder, spec, self.tokenizer)

    def _predicted(self, prediction: str | Sequence[int]) -> tuple[int, ...]:
        """The tokens of what a client expects. Raises InvalidRequest."""
        if not prediction:
            return ()
        if isinstance(prediction, str):
            with contextlib.suppress(PromptTooLong):  # which is said below
                prediction = self.tokenizer.encode(prediction, False, self.max_model_len)
        if isinstance(prediction, str) or len(prediction) > self.max_model_len:
            raise InvalidRequest(
                f"prediction is longer than the maximum context length of {self.max_model_len} tokens, and no answer "
                "is: shorten it"
            )
        for token in prediction:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise InvalidRequest(
                    f"prediction holds {shown(token)}: the model has token ids 0 to {self.vocab_size - 1}"
                )
        return tuple(prediction)

    def _check_tokens(self, token_ids: list[int], images: int) -> None:
        if not token_ids:
            raise InvalidRequest("the prompt is empty: it needs at least one token")
        if self.model.is_encoder and len(token_ids) > self.max_model_len:
            message = (
                f"the text has {len(token_ids)} tokens, and {self.model.model_type} reads {self.max_model_len} at most:"
                " shorten it"
            )
            raise PromptTooLong(message, len(token_ids), self.max_model_len)
        if not self.model.is_encoder and len(token_ids) >= self.max_model_len:
            most = self.max_model_len - 1
            seen = token_ids.count(self.images.spec.image_id) if images and self.model.reads_images else 0
            message = (  # agents shorten their conversations where they read "maximum context length"
                f"the prompt has {len(token_ids)} tokens{f', {seen} of them of {images} images' if seen else ''}, and "
                f"at most {most} leave room for an answer in the maximum context length of {self.max_model_len} "
                f"tokens: the prompt is too long; shorten it{', send smaller images' if seen else ''}, or raise "
                "max_model_len if the model allows"
            )
            raise PromptTooLong(message, len(token_ids), most)
        with contextlib.suppress(msgspec.ValidationError):  # it does not say what is wrong where, but is fast
            msgspec.convert(token_ids, self._token_ids)
            return
        for position, token in enumerate(token_ids):
            if isinstance(token, bool) or not isinstance(token, int):
                raise InvalidRequest(f"the prompt holds {shown(token)} at position {position}: token ids are integers")
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest(
                    f"the prompt holds token id {shown(token)} at position {position}: the model has ids 0 to "
                    f"{self.vocab_size - 1}"
                )

    def _resolve(self, params: SamplingParams) -> ResolvedParams:
        for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if not 0 <= token < self.vocab_size:
                    raise InvalidParameter(
                        f"{name} holds token id {token}: the model has ids 0 to {self.vocab_size - 1}"
                    )
        if params.logits_processors:
            from kvern.sample.processors import check_arguments

            check_arguments(self._processors, params.logits_processors)
        if params.beam_width is not None and params.beam_width > self._max_batch_requests:
            raise InvalidParameter(
                f"beam_width is {params.beam_width}, and {self._max_batch_requests} sequences run at the same time at "
                "most: lower it, or raise max_batch_requests"
            )
        return params.resolved(self._defaults)

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        spellings = (spelling for word in params.bad_words or () for spelling in (word, " " + word))
        encoded = (tuple(self.tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings)
        return tuple(dict.fromkeys(ids for ids in encoded if ids and max(ids) < self.vocab_size))


def is_checked_quickly(token_ids: Sequence[int], params: SamplingParams | None, options: RequestOptions) -> bool:
    """True if `InputProcessor.request` takes less time than a thread does to begin: it encodes and compiles nothing."""
    if len(token_ids) > MOST_AT_ONCE or options.prediction:
        return False
    if params is None:
        return True
    needs_more = params.structured is not None or params.penalizes_repetitions
    listed = (params.bad_words, params.logits_processors, params.logit_bias, params.allowed_token_ids)
    return not needs_more and not any(listed) and len(params.stop_token_ids or ()) <= MOST_AT_ONCE


def processors_of(config: EngineConfig) -> "Processors":
    """The logits processors that requests may use, imported now. Raises ConfigError."""
    if not config.logits_processors:
        return {}
    from kvern.sample.processors import load_processors

    return load_processors(config.logits_processors)


def _check_that_something_can_be_sampled(
    params: SamplingParams, stop: frozenset[int], bad_word_ids: tuple[tuple[int, ...], ...]
) -> None:
    banned = {word[0] for word in bad_word_ids if len(word) == 1} | (stop if params.min_tokens else set())
    if params.allowed_token_ids is not None and banned.issuperset(params.allowed_token_ids):
        raise InvalidParameter(
            f"allowed_token_ids holds {len(params.allowed_token_ids)} tokens, and bad_words or min_tokens ban all of "
            "them: allow another one"
        )


def _unread(folder: Path) -> str | None:
    """The reason why a model in a GGUF file reads no images; None: it is in no such file."""
    if not any(folder.glob("*.gguf")):
        return None
    return "a GGUF file holds the language model alone, and encoders (mmproj) are not read; serve its safetensors"


def _refusal(model: ModelFacts) -> str | None:
    """Why the model generates nothing; None: it does."""
    if model.is_classifier:
        return "the model is a classifier and generates no text: ask /v1/rerank or /v1/score"
    if model.is_encoder:
        return f"{model.model_type} is an encoder: it gives embeddings and generates nothing; ask /v1/embeddings"
    if not model.generates:
        return "this model has no output layer (lm_head): it gives embeddings and generates nothing"
    return None


def _check_contents(prompt: PromptInput, model: ModelFacts) -> None:
    if prompt.second_text is not None and (not model.is_encoder or not 0 <= prompt.second_text <= len(prompt)):
        raise InvalidRequest(
            f"second_text is {prompt.second_text}: only encoders read two texts together, and it is a position in them"
        )
    if prompt.attachments and not model.reads_images:
        raise InvalidRequest(
            f"the prompt has {len(prompt.attachments)} attachments: this model reads nothing but tokens; leave them out"
        )
    if prompt.spans:
        raise InvalidRequest("the prompt has spans: images of the prompt alone have such; leave them out")
    last = -1
    for entry in prompt.block_keys:
        position, digest = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, b"")
        if type(position) is not int or not last < position < len(prompt):
            raise InvalidRequest(
                f"block_keys has position {shown(position)} after {last}: positions ascend, within the "
                f"{len(prompt)} tokens of the prompt"
            )
        if not isinstance(digest, bytes) or not 0 < len(digest) <= LONGEST_DIGEST:
            raise InvalidRequest(
                f"block_keys has {shown(digest)} at position {position}: it must be 1 to {LONGEST_DIGEST} bytes"
            )
        last = position


def as_list(prompt: Any) -> list[int]:
    """Token ids as a list. Raises InvalidRequest if they are not several things."""
    if not isinstance(prompt, Iterable):
        raise InvalidRequest(f"the prompt is {shown(prompt)}: it must be a text or a list of token ids")
    return list(prompt)


def _generation_defaults(folder: Path) -> dict[str, float]:
    """The parameters that the checkpoint recommends; without do_sample the most probable token."""
    stored = read_json(folder / "generation_config.json")
    defaults = {name: stored[name] for name in USUAL if isinstance(stored.get(name), (int, float))}
    if stored.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults
