"""ollama's /api/chat, /api/generate and embeddings: bodies, answers and lines of streams."""

import asyncio
import datetime
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvern.api.chat_fields import read_thinking
from kvern.api.conversation import ChatBody, plain_messages
from kvern.api.errors import HttpError, wrong_value
from kvern.api.fields import COMMON_FIELDS, PARAMETERS, CommonFields, read_common, sampling_params, typed
from kvern.api.logprobs import finite, tables_at_once
from kvern.api.message_blocks import blocks
from kvern.api.other_names import ignored, in_own_words
from kvern.errors import InvalidRequest, shown
from kvern.io.json_lines import as_json
from kvern.request.outputs import CompletionOutput, RequestOutput
from kvern.request.pieces import Content, Message, Piece, Reasoning
from kvern.request.sampling_params import SamplingParams
from kvern.text.content import MediaPart
from kvern.tools.chat import AnswerReader, ChatRequest, PlainParser, PromptOptions
from kvern.tools.checks import read_tools

CHAT = "/api/chat"
GENERATE = "/api/generate"
LINES = "application/x-ndjson"
"""The content type of streams: one JSON value a line."""
VERSION = "0.12.11"
"""The version of ollama whose API this is: clients check it before they use newer features."""
LATEST = ":latest"
"""The tag that ollama adds to a model's name without one."""
OPTIONS = PARAMETERS - {"beam_width", "structured"}
"""Sampling parameters that `options` may hold; other options are ignored."""
REFUSED = {"template": "the model's own is used"}
NO_IMAGES = "this model takes text only; leave them out"
KNOWN = frozenset(
    {"model", "name", "messages", "tools", "prompt", "system", "raw", "context", "format", "options", "stream", "think"}
    | {"suffix", "images", "logprobs", "top_logprobs", "keep_alive", *REFUSED, *COMMON_FIELDS}
)


@dataclass(frozen=True)
class OllamaBody:
    """The contents of a body of either route. An empty body asks to load the model."""

    conversation: ChatBody | None
    """None if `prompt` goes to the model as it is."""
    prompt: str
    context: list[int]
    """Token ids of an earlier prompt and its answer, put before the prompt."""
    params: SamplingParams
    common: CommonFields
    stream: bool
    is_empty: bool
    suffix: str = ""
    """The text after the gap that the answer fills."""


def read_body(body: Mapping[str, Any], url: str) -> OllamaBody:
    """Checks a body of CHAT or GENERATE. Raises HttpError, InvalidRequest or InvalidParameter."""
    body = in_own_words(body, KNOWN)
    for name, why in REFUSED.items():
        if body.get(name):
            raise HttpError(400, f"{name} is {shown(body[name])}: {why}; leave it out")
    prompt, context = typed(body, "prompt", str, ""), typed(body, "context", list, [])
    messages = _messages(typed(body, "messages", list, [])) if url == CHAT else []
    suffix = _suffix(body, url)
    images = body.get("images") or []
    if images and (url == CHAT or suffix or typed(body, "raw", bool, False)):
        raise HttpError(400, "images stand in messages, or beside a prompt that is neither raw nor has a suffix")
    if url == GENERATE and (prompt or images) and not suffix:
        system = typed(body, "system", str, "")
        messages = [{"role": "system", "content": system}] if system else []
        messages += _messages([{"role": "user", "content": prompt, "images": images}])
    tools, variables = read_tools(body.get("tools") if url == CHAT else None), _thinking(body.get("think"))
    conversation = None
    is_raw = typed(body, "raw", bool, False) and url == GENERATE
    if messages and not is_raw:
        conversation = ChatBody(plain_messages(messages), tools, PromptOptions(variables=variables))
    stream = typed(body, "stream", bool, True)
    is_empty = not messages and not suffix
    return OllamaBody(conversation, prompt, context, _params(body), read_common(body), stream, is_empty, suffix)


def _suffix(body: Mapping[str, Any], url: str) -> str:
    """Reads `suffix`. Raises HttpError if it does not go with the rest of the body."""
    suffix: str = typed(body, "suffix", str, "")
    for name in ("messages", "system", "context") if suffix else ():
        if body.get(name) or url == CHAT:
            raise HttpError(400, f"suffix is {shown(suffix)}: {GENERATE} takes it with a prompt alone, without {name}")
    return suffix


def ignored_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body with its ignored options as fields named `options.NAME`."""
    options = body.get("options")
    names = ignored(options, OPTIONS) if isinstance(options, dict) else []
    return {**body, **{f"options.{name}": None for name in names}}


def _params(body: Mapping[str, Any]) -> SamplingParams:
    options: dict[str, Any] = typed(body, "options", dict, {})
    values = {name: value for name, value in in_own_words(options, OPTIONS, "options.").items() if name in OPTIONS}
    if typed(options, "num_predict", int, 1) <= 0:
        del values["max_tokens"]  # no end but the model's
    form = body.get("format")
    if form not in (None, ""):
        if form != "json" and not isinstance(form, dict):
            raise wrong_value("format", form, "json or a JSON schema")
        values["structured"] = {"json": True if form == "json" else form}
    params = sampling_params(SamplingParams(), {**values, "logprobs": typed(body, "top_logprobs", int, 0)})
    return params if typed(body, "logprobs", bool, False) else params.replace(logprobs=None)


def _thinking(think: object) -> dict[str, Any]:
    """Returns the template variables for `think`: true, false or an effort."""
    if not isinstance(think, bool | str | None):
        raise InvalidRequest(f"think is {shown(think)}: it must be true, false, or a text such as high")
    return read_thinking({"enable_thinking" if isinstance(think, bool) else "reasoning_effort": think}).variables


def _images(images: object, place: str) -> list[MediaPart]:
    """Returns the images beside the text of a message."""
    each = images if isinstance(images, list) else [images]
    return [MediaPart("image", image, f"{place}: {NO_IMAGES}") for image in each]


def _messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns messages in OpenAI's format: results of tools refer to calls by ids, not by the tools' names."""
    waiting: dict[str | None, deque[str]] = defaultdict(deque)
    count, converted = 0, []
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidRequest(f"messages[{number}] is {shown(message)}: it must be an object")
        plain = {"content": "", **{name: value for name, value in message.items() if value is not None}}
        if images := plain.pop("images", None):
            plain["content"] = [*_images(images, f"messages[{number}].images"), plain["content"]]
        tool = plain.pop("tool_name", None)
        thinking = plain.pop("thinking", None)
        calls = plain.get("tool_calls")
        if isinstance(thinking, str):
            plain["reasoning_content"] = thinking
        if isinstance(calls, list):
            plain["tool_calls"] = []
            for call in calls:
                function = call.get("function") if isinstance(call, dict) else None
                name = function.get("name") if isinstance(function, dict) else None
                found = {"id": f"call{count:05d}", "type": "function", **(call if isinstance(call, dict) else {})}
                count += 1
                for key in {None, name if isinstance(name, str) else None}:
                    waiting[key].append(found["id"])
                plain["tool_calls"].append(found)
        if plain.get("role") == "tool" and "tool_call_id" not in plain:
            queue = waiting[tool if isinstance(tool, str) else None]
            plain["tool_call_id"] = queue.popleft() if queue else f"call{count:05d}"
            if isinstance(tool, str):
                plain["name"] = tool
        converted.append(plain)
    return converted


@dataclass(frozen=True)
class Seconds:
    """Durations of a request: from its first step to its first token, from there to its last, and in all."""

    prompt: float
    answer: float
    whole: float


@dataclass
class OllamaWriter:
    """Writes the answer to one body."""

    url: str
    model: str
    chat: ChatRequest | None
    """Reads the answer; None: the text is the answer."""
    _tokens: int = field(default=0, init=False)
    """The number of tokens whose log-probabilities are encoded."""
    _logprobs: list[msgspec.Raw] = field(default_factory=list, init=False)
    """Log-probabilities that are encoded and not sent."""

    def whole(self, output: RequestOutput, seconds: Seconds) -> dict[str, Any]:
        """Returns the whole answer."""
        answer, reader = output.outputs[0], self._reader()
        reader.read(answer.text, True)
        return {**self._head(), **self._said(reader.message, answer), **self._end(output, seconds)}

    async def lines(
        self, output: RequestOutput, news: AsyncIterable[None], seconds: Callable[[], Seconds]
    ) -> AsyncIterator[object]:
        """Yields what is new, then calls of tools, then the end."""
        answer, reader = output.outputs[0], self._reader()
        async for _ in news:
            while self._write_some(answer):
                await asyncio.sleep(0)
            message = said_by(reader.read(answer.text, answer.finish_reason is not None))
            if message.content or message.reasoning:
                yield {**self._head(), **self._said(message, answer), "done": False}
        if reader.message.tool_calls:
            yield {**self._head(), **self._said(Message(tool_calls=reader.message.tool_calls), answer), "done": False}
        yield {**self._head(), **self._said(Message(), answer), **self._end(output, seconds())}

    def loaded(self, reason: str) -> dict[str, Any]:
        """Returns the answer to an empty body: the model is loaded, or will be unloaded."""
        nothing = self._said(Message(), CompletionOutput(0))
        return {**self._head(), **nothing, "done": True, "done_reason": reason}

    def _reader(self) -> AnswerReader:
        return AnswerReader(PlainParser(), None) if self.chat is None else self.chat.reader()

    def _head(self) -> dict[str, Any]:
        return {"model": self.model, "created_at": timestamp(time.time())}

    def _said(self, message: Message, answer: CompletionOutput) -> dict[str, Any]:
        thought = {"thinking": message.reasoning} if message.reasoning else {}
        said: dict[str, Any] = {"response": message.content, **thought}
        if self.url == CHAT:
            content = {"role": "assistant", "content": message.content, **thought}
            calls = [tool_call(block) for block in blocks(message) if block["type"] == "tool_use"]
            said = {"message": {**content, **({"tool_calls": calls} if calls else {})}}
        while self._write_some(answer):
            pass
        if self._logprobs:
            said["logprobs"], self._logprobs = self._logprobs, []
        return said

    def _write_some(self, answer: CompletionOutput) -> bool:
        """Encodes log-probabilities of a few tokens. Returns False if there were none."""
        if answer.logprobs is None or len(answer.token_ids) == self._tokens:
            return False
        end = min(self._tokens + tables_at_once(answer.logprobs.most), len(answer.token_ids))
        self._logprobs += token_logprobs(answer, self._tokens, end)
        self._tokens = end
        return True

    def _end(self, output: RequestOutput, seconds: Seconds) -> dict[str, Any]:
        """Returns the end of an answer with its durations. Loading is the time before its first step."""
        answer = output.outputs[0]
        has_context = self.url == GENERATE and self.chat is not None
        known = {"context": [*output.prompt_token_ids, *answer.token_ids]} if has_context else {}
        return {
            "done": True,
            "done_reason": "length" if answer.finish_reason == "length" else "stop",
            **known,
            "total_duration": nanoseconds(seconds.whole),
            "load_duration": nanoseconds(seconds.whole - seconds.prompt - seconds.answer),
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": nanoseconds(seconds.prompt),
            "eval_count": len(answer.token_ids),
            "eval_duration": nanoseconds(seconds.answer),
        }


def said_by(pieces: Sequence[Piece]) -> Message:
    """Returns the message of pieces without calls."""
    message = Message()
    message.add(piece for piece in pieces if isinstance(piece, Content | Reasoning))
    return message


def tool_call(block: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call in ollama's format: its arguments are an object."""
    return {"id": block["id"], "function": {"name": block["name"], "arguments": block["input"]}}


def token_logprobs(answer: CompletionOutput, start: int, end: int) -> list[msgspec.Raw]:
    """Returns the log-probabilities of tokens, each with the most probable tokens in its place, as JSON."""
    found = []
    for table in answer.logprobs[start:end] if answer.logprobs is not None else ():
        entries = [{"token": entry.token or "", "logprob": finite(entry.logprob)} for entry in table.values()]
        found.append(as_json({**entries[0], "top_logprobs": entries}))
    return found


def nanoseconds(seconds: float) -> int:
    """Returns a duration in ollama's unit."""
    return max(0, round(seconds * 1e9))


def timestamp(seconds: float) -> str:
    """Returns a time (seconds since 1970) as text."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")
