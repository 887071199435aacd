"""The server's side of inputs: requests and token ids made in threads, and grammars in processes of their own."""

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvern.config import EngineConfig
from kvern.engine.inputs import InputProcessor, Messages, Prompt, RequestLimits, processors_of
from kvern.errors import InvalidRequest, ServerBusy
from kvern.request.request import PromptInput
from kvern.request.sampling_params import SamplingParams
from kvern.serving.wire import Ready
from kvern.spec.facts import ModelFacts
from kvern.structured.apart import GrammarProcesses
from kvern.structured.grammar import NotCompiled
from kvern.text.content import MediaPart
from kvern.text.tokenizer import Tokenizer
from kvern.tools.chat import ChatRequest, PromptOptions
from kvern.tools.definitions import ToolUse
from kvern.tools.encoding import Encoding

if TYPE_CHECKING:
    from kvern.engine.scoring import Pair, ScoredPrompt

T = TypeVar("T")

MOST_COMPILED = 4
"""The number of times that one form is compiled for one request if the cache drops it each time."""

LONG_INPUT = 1 << 16
"""Characters or tokens beyond which an input waits for one of `LONG_THREADS`."""
LONG_THREADS = 2
MOST_COUNTED = 1 << 17
"""Tokens of a text or conversation that is only counted, where the model's context is shorter."""


class ClientInputs:
    """Runs an InputProcessor in threads, for an event loop. It can be used once `start` has told of an engine.

    With `grammars_apart` processes of their own compile grammars, which strangers may have written; else the threads
    do. Raises ConfigError if a logits processor of the configuration cannot be loaded.
    """

    def __init__(self, config: EngineConfig, folder: Path, tokenizer: Tokenizer, grammars_apart: bool = True) -> None:
        self._config = config
        self._folder = folder
        self._tokenizer = tokenizer
        self._custom = processors_of(config)
        self._long = ThreadPoolExecutor(LONG_THREADS, thread_name_prefix="long-input")
        self._grammars_apart = grammars_apart
        self._grammars: GrammarProcesses | None = None
        self._processor: InputProcessor | None = None

    def start(self, ready: Ready) -> None:
        """Make requests for an engine of these sizes, the first one or one after a rest."""
        if self._processor is not None:
            if self._grammars is not None:
                self._grammars.start()
            return
        self._processor = InputProcessor(
            self._tokenizer,
            ready.model,
            self._folder,
            RequestLimits(ready.max_model_len, ready.max_batch_requests),
            self._config,
            self._custom,
            self._grammars_apart,
        )
        if self._grammars_apart:  # at the start: for the first request with a grammar it would take 0.3 s
            self._grammars = GrammarProcesses(self._processor.grammars)
            self._grammars.start()

    async def rest(self) -> None:
        """End the processes, unless they compile a form; they start again when they are needed."""
        if self._grammars is not None and not self._grammars.busy:
            grammars, self._grammars = self._grammars, GrammarProcesses(self.processor.grammars)
            await grammars.close()

    async def close(self) -> None:
        """End the processes, and let nothing begin that waits for a thread."""
        try:
            if self._grammars is not None:
                await self._grammars.close()
        finally:
            self._long.shutdown(wait=False, cancel_futures=True)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return self.processor.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below."""
        return self.processor.vocab_size

    @property
    def model(self) -> ModelFacts:
        """The facts of the model that requests depend on."""
        return self.processor.model

    async def chat(
        self, messages: Messages, params: SamplingParams, use: ToolUse, options: PromptOptions, owner: str = ""
    ) -> ChatRequest:
        """`Chat.request`. Raises InvalidRequest, InvalidParameter or ServerBusy."""
        work = functools.partial(self.processor.chat.request, messages, params, use, options)
        return await self.run(_characters(messages), work, owner)

    async def chat_prompt(
        self,
        messages: Messages,
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """The conversation as token ids. Raises InvalidRequest."""

        def work() -> list[int]:
            options = PromptOptions(
                variables=variables,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            encode = functools.partial(self._counted, add_special_tokens=add_special_tokens)
            return self.processor.chat.token_ids(messages, tools, options, encode)

        return await self._in_thread(_characters(messages), work)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A text as token ids. Raises InvalidRequest."""
        return await self._in_thread(len(text), functools.partial(self._counted, text, add_special_tokens))

    async def pair(self, first: str, second: str) -> PromptInput:
        """`InputProcessor.pair`. Raises InvalidRequest."""
        return await self._in_thread(len(first) + len(second), functools.partial(self.processor.pair, first, second))

    async def picture(self, part: Mapping[str, Any], place: str) -> PromptInput:
        """`InputProcessor.picture`. Raises InvalidRequest."""
        return await self._in_thread(_size(part), functools.partial(self.processor.picture, part, place))

    async def encoded(self, prompt: Prompt, encoding: Encoding, answer: int | None) -> Prompt:
        """A prompt as token ids, whose answer may have `answer` tokens. Raises InvalidRequest."""
        if isinstance(prompt, list):
            return encoding.cut(prompt, self.max_model_len, answer)
        if not isinstance(prompt, str):
            return prompt
        work = functools.partial(encoding.encode, self._tokenizer, prompt, self.max_model_len, answer)
        return await self._in_thread(len(prompt), work)

    async def infilled(
        self, prompts: Sequence[Prompt], suffix: str, params: SamplingParams
    ) -> tuple[list[Prompt], SamplingParams]:
        """Prompts that ask for what is missing before `suffix`, and parameters whose answers end there.

        Raises InvalidRequest.
        """
        from kvern.text.infill import needed_infill

        infill = needed_infill(self._tokenizer, suffix)
        found: list[Prompt] = []
        for prompt in prompts:
            if not isinstance(prompt, str | list):
                raise InvalidRequest("suffix goes with a prompt that is a text or a list of token ids")
            text = prompt if isinstance(prompt, str) else ""
            self._tokenizer.check_length(text + suffix, self.max_model_len)
            work = functools.partial(infill.prompt, prompt, suffix)
            found.append(await self._in_thread(len(prompt) + len(suffix), work))
        return found, params.replace(stop_token_ids=[*(params.stop_token_ids or ()), *infill.ends])

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids as text, special tokens included."""
        work = functools.partial(self._tokenizer.decode, token_ids, skip_special_tokens=False)
        return await self._in_thread(len(token_ids), work)

    async def scored_prompts(self, pairs: "Sequence[Pair]", add_special_tokens: bool) -> "list[ScoredPrompt]":
        """`scored_prompts`. Raises InvalidRequest."""
        from kvern.engine.scoring import scored_prompts

        work = functools.partial(scored_prompts, self._tokenizer, pairs, add_special_tokens, self.max_model_len)
        return await self._in_thread(sum(len(side) for pair in pairs for side in pair), work)

    @property
    def processor(self) -> InputProcessor:
        """The processor, for callers in threads of their own."""
        assert self._processor is not None, "the engine is not ready"
        return self._processor

    async def run(self, size: int, work: Callable[[], T], owner: str) -> T:
        """Runs `work` on an input of so many characters or tokens in a thread, with the grammars that it needs.

        Raises what `work` raises, InvalidParameter for a form that takes too much to compile, and ServerBusy.
        """
        compiled = Counter[bytes]()
        while True:
            try:
                return await self._in_thread(size, work)
            except NotCompiled as missing:
                form = missing.form
            if compiled[form] == MOST_COMPILED:
                raise ServerBusy("structured: too many other forms are compiled at the same time: try again later")
            compiled[form] += 1
            assert self._grammars is not None, "only grammars that are made apart are not compiled"
            await self._grammars.compile(form, owner)

    def _counted(self, text: str, add_special_tokens: bool) -> list[int]:
        most = max(self.max_model_len, MOST_COUNTED)
        token_ids = self._tokenizer.encode(text, add_special_tokens, most_tokens=most)
        if len(token_ids) > most:
            raise InvalidRequest(f"the prompt has {len(token_ids)} tokens: {most} at most are counted; shorten it")
        return token_ids

    async def _in_thread(self, size: int, work: Callable[[], T]) -> T:
        """Work on an input of so many characters or tokens; long ones wait for each other, and nobody for them."""
        pool = self._long if size > LONG_INPUT else None
        return await asyncio.get_running_loop().run_in_executor(pool, work)


def _characters(messages: Messages) -> int:
    """Returns the approximate number of characters of all contents, or of bytes of their images."""
    return sum(map(_size, messages))


def _size(content: object) -> int:
    """Returns the approximate size of a value without writing it out: it may be an image of many megabytes."""
    if isinstance(content, str | bytes):
        return len(content)
    if isinstance(content, MediaPart):
        return _size(content.sent)
    if isinstance(content, Mapping):
        return sum(map(_size, content.values()))
    return sum(map(_size, content)) if isinstance(content, list | tuple) else 0
