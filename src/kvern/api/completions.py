"""Bodies of OpenAI's /v1/chat/completions and /v1/completions.

A body may hold every field of ``SamplingParams`` beside OpenAI's own parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvern.api.chat_fields import CHAT_FIELDS
from kvern.api.conversation import ChatBody, read_chat_body
from kvern.api.errors import HttpError, wrong_value
from kvern.api.fields import (
    COMMON_FIELDS,
    WITHOUT_EFFECT,
    CommonFields,
    Refused,
    check_refused,
    read_common,
    sampling_params,
    typed,
)
from kvern.api.forms import STRUCTURED, structured_of
from kvern.api.other_names import WINDOWS, in_own_words
from kvern.engine.inputs import Prompt
from kvern.errors import InvalidParameter, shown
from kvern.request.other_names import RENAMED
from kvern.request.sampling_params import MAX_LOGPROBS, SamplingParams
from kvern.tools.encoding import ROOM_FOR_ANSWER, Encoding


def read_prediction(body: Mapping[str, Any]) -> str:
    """Returns the text of `prediction`, empty if there is none. Raises HttpError."""
    prediction = typed(body, "prediction", dict, None)
    if prediction is None:
        return ""
    if prediction.get("type") != "content":
        message = f"prediction.type is {shown(prediction.get('type'))}: it must be content"
        raise HttpError(400, message, param="prediction")
    content = prediction.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(_is_text(part) for part in parts):
        message = f"prediction.content is {shown(content)}: it must be a text, or a list of parts of type text"
        raise HttpError(400, message, param="prediction")
    return "".join(part["text"] for part in parts)


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` in /v1/completions."""
MOST_PROMPTS = 256
LONGEST_ID = 128
"""The limit of a `request_id` in characters."""
LONGEST_INTERVAL = 1024
# fmt: off
OWN_FIELDS = {
    "prompt", "max_completion_tokens", "top_logprobs", "logprobs", "use_beam_search", "truncate_prompt_tokens",
    "truncation_side", "add_special_tokens", "return_token_ids", "return_tokens_as_token_ids", "request_id",
    "stream_interval", *STRUCTURED, *CHAT_FIELDS,
}
# fmt: on
_NOT_DONE = "this server does not do that"
_CACHED = "this server computes prompts itself, or has them in its cache; leave it out"
_TEMPLATE = (
    "a template is a program, and this server runs its operator's only; leave it out, or send the prompt as you want "
    "it to /v1/completions"
)
ONLY_VALUES: Refused = {
    **dict.fromkeys(("stream", "echo", "watermarking"), ((False,), _NOT_DONE)),
    **dict.fromkeys(("stream_options", "audio", "repetition_detection"), ((), _NOT_DONE)),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), ((), _CACHED)),
    "suffix": (("",), _NOT_DONE),
    "best_of": ((1,), _NOT_DONE),
    "modalities": ((["text"],), _NOT_DONE),
    "functions": (([],), "it is the older name of tools; send tools instead"),
    "function_call": (("none", "auto"), "it is the older name of tool_choice; send tools and tool_choice instead"),
    "chat_template": ((), _TEMPLATE),
    "prompt_embeds": ((), "this server reads tokens, no embeddings; send prompt, a text or a list of token ids"),
    "web_search_options": ((), "this server searches nothing; give the model a tool that does"),
    "logprob_token_ids": ((), "ask for top_logprobs, or send the texts to /v1/score"),
}
"""Fields of OpenAI and vLLM with the values that change nothing, and advice. The routes support some of them with any
value; files of requests do not."""
FIELDS = frozenset(WITHOUT_EFFECT | OWN_FIELDS | set(ONLY_VALUES) | set(SamplingParams.__struct_fields__))
KNOWN = FIELDS | set(COMMON_FIELDS)


def known_fields(url: str) -> frozenset[str]:
    """Returns the fields that have an effect on the route CHAT or COMPLETIONS."""
    return KNOWN - ({"prompt"} if url == CHAT else CHAT_FIELDS)


ENTRIES_AT_ONCE = 1024
"""The log-probabilities that are encoded before other tasks have a turn."""


@dataclass(frozen=True)
class AnswerOptions:
    """Options of how the answers of either route are written."""

    url: str = COMPLETIONS
    answers: int = 1
    """The answers to each prompt, `n`. More are generated with a larger `best_of`."""
    logprobs: int | None = None
    """The number of most probable tokens shown beside each token of the answer."""
    prompt_logprobs: bool = False
    include_reasoning: bool = True
    include_usage: bool = False
    """The stream ends with the usage."""
    continuous_usage: bool = False
    """Each chunk has the usage of its choice so far."""
    echo: bool = False
    prompt_only: bool = False
    """`max_tokens` is 0: the answer is the echo alone."""
    custom_tools: frozenset[str] = frozenset()
    """`ChatBody.custom_tools`."""
    prefix: str = ""
    """The text that the answer to a conversation continues and, with `echo`, repeats."""
    token_ids: bool = False
    """Answers have token ids beside texts."""
    ids_as_tokens: bool = False
    """Log-probabilities name tokens by their ids."""
    request_id: str | None = None
    skips_special: bool = True
    visible: frozenset[int] = frozenset()
    """Special tokens that are nevertheless part of the text."""
    service_tier: bool = False
    """The request named a service tier."""
    stream_interval: int = 1

    @property
    def is_chat(self) -> bool:
        """The answers are to a conversation."""
        return self.url == CHAT


@dataclass(frozen=True)
class CompletionBody:
    """The contents of a body of either route: a conversation, or prompts.

    `encoding` is how texts are tokenized and prompts truncated; None is the default.
    """

    conversation: ChatBody | None
    prompts: list[Prompt]
    params: SamplingParams
    common: CommonFields
    stream: bool
    options: AnswerOptions
    encoding: Encoding | None = None
    suffix: str = ""
    """The text after the gap that the answer fills."""


def read_completion(body: Mapping[str, Any], url: str, defaults: SamplingParams | None = None) -> CompletionBody:
    """Checks a body of CHAT or COMPLETIONS. Raises HttpError, InvalidRequest or InvalidParameter."""
    is_chat = url == CHAT
    body = in_own_words(body, known_fields(url))
    _check_only_values(body, is_chat)
    echo = typed(body, "echo", bool, False)
    prompt_only = echo and not is_chat and body.get("max_tokens") == 0
    if defaults is None:
        defaults = SamplingParams() if is_chat else SamplingParams(max_tokens=COMPLETION_TOKENS)
    params = sampling_params(defaults, parameters(body, url) | ({"max_tokens": 1} if prompt_only else {}))
    answers, logprobs = params.n, params.logprobs
    stream = typed(body, "stream", bool, False)
    of_prompt = params.prompt_logprobs is not None
    if echo and logprobs is not None and not is_chat:
        if stream:
            raise HttpError(400, "echo, logprobs and stream are set: ask for two of them at most", param="echo")
        params = params.replace(prompt_logprobs=logprobs)
    best_of = answers if is_chat or body.get("use_beam_search") else typed(body, "best_of", int, answers)
    if best_of < answers or (best_of > answers and stream):
        message = f"best_of is {best_of} with n {answers}: it must not be smaller, and a stream cannot choose the best"
        raise HttpError(400, message, param="best_of")
    if best_of > answers:
        params = params.replace(n=best_of, logprobs=logprobs or 0)
    encoding = read_encoding(body, special=not is_chat)
    conversation = read_chat_body(body, encoding) if is_chat else None
    options = _answer_options(
        body,
        url,
        conversation,
        answers=answers,
        logprobs=logprobs,
        prompt_logprobs=of_prompt,
        prompt_only=prompt_only,
        skips_special=params.skip_special_tokens,
        visible=frozenset(params.visible_token_ids or ()),
    )
    prompts = [] if is_chat else read_prompts(body)
    common = read_common(body)
    if is_chat:
        asked = msgspec.structs.replace(common.options, prediction=read_prediction(body))
        common = replace(common, options=asked)
    return CompletionBody(conversation, prompts, params, common, stream, options, encoding, _suffix(body, encoding))


def _suffix(body: Mapping[str, Any], encoding: Encoding | None) -> str:
    """Reads `suffix`. Raises HttpError if another field contradicts it."""
    suffix: str = typed(body, "suffix", str, "")
    if suffix and (encoding is not None or body.get("echo")):
        others = "echo, truncate_prompt_tokens and add_special_tokens"
        raise HttpError(400, f"suffix is {shown(suffix)}: it does not go with {others}; leave one out", param="suffix")
    return suffix


def _answer_options(body: Mapping[str, Any], url: str, conversation: ChatBody | None, **found: Any) -> AnswerOptions:
    """Returns the options, some of which the caller has `found`. Raises HttpError."""
    streaming = typed(body, "stream_options", dict, {})
    echo, usage = typed(body, "echo", bool, False), bool(streaming.get("include_usage"))
    return AnswerOptions(
        url,
        include_reasoning=conversation is None or conversation.include_reasoning,
        custom_tools=frozenset() if conversation is None else conversation.custom_tools,
        include_usage=usage,
        continuous_usage=usage and bool(streaming.get("continuous_usage_stats")),
        echo=echo and conversation is None,
        prefix=_prefix(conversation) if echo and conversation is not None else "",
        token_ids=typed(body, "return_token_ids", bool, False),
        ids_as_tokens=typed(body, "return_tokens_as_token_ids", bool, False),
        request_id=_request_id(body),
        service_tier=typed(body, "service_tier", str, None) is not None,
        stream_interval=min(max(typed(body, "stream_interval", int, 1), 1), LONGEST_INTERVAL),
        **found,
    )


def read_encoding(body: Mapping[str, Any], special: bool, side: str = "left") -> Encoding | None:
    """Reads `add_special_tokens`, `truncate_prompt_tokens` and `truncation_side`; None is the default. Raises
    HttpError.

    `special` and `side` are the defaults of adding special tokens and of the side where prompts are cut.
    """
    most = read_most_tokens(body)
    side = typed(body, "truncation_side", str, side)
    if side not in ("left", "right"):
        raise wrong_value("truncation_side", side, "left (the end stays) or right (the beginning)")
    wanted = typed(body, "add_special_tokens", bool, special)
    return None if most is None and wanted == special else Encoding(wanted, most, side == "left")


def read_most_tokens(body: Mapping[str, Any]) -> int | None:
    """Reads `truncate_prompt_tokens`: 1 or more, or ROOM_FOR_ANSWER. Raises HttpError."""
    most: int | None = typed(body, "truncate_prompt_tokens", int, None)
    if most is not None and most != ROOM_FOR_ANSWER and most < 1:
        raise wrong_value("truncate_prompt_tokens", most, "1 or more, or -1 for as many as the context has room for")
    return most


def _prefix(conversation: ChatBody) -> str:
    """Returns the last message's content if it is the assistant's."""
    last = conversation.messages[-1]
    return str(last["content"]) if last.get("role") == "assistant" else ""


def _request_id(body: Mapping[str, Any]) -> str | None:
    request_id: str | None = typed(body, "request_id", str, None)
    if request_id is not None and not (
        0 < len(request_id) <= LONGEST_ID and request_id.isascii() and request_id.isprintable()
    ):
        raise wrong_value("request_id", request_id, f"1 to {LONGEST_ID} printable ASCII characters")
    return request_id


def _check_only_values(body: Mapping[str, Any], is_chat: bool) -> None:
    supported = {"stream", "stream_options", "echo", *(() if is_chat else ("suffix",))}
    if not is_chat or body.get("use_beam_search"):
        supported.add("best_of")  # of a search it is the number of beams
    check_refused(body, {name: refusal for name, refusal in ONLY_VALUES.items() if name not in supported})


def check_fields(body: Mapping[str, Any]) -> None:
    """Refuses fields that a file of requests cannot use, and unknown ones, by name. Raises InvalidParameter."""
    for name, value in body.items():
        if name in ONLY_VALUES and not (name == "best_of" and body.get("use_beam_search")):
            if value is not None and value not in ONLY_VALUES[name][0]:
                raise InvalidParameter(f"{name} is {shown(value)}: a batch does not support that; leave it out")
        elif name not in FIELDS and name not in RENAMED and name not in WINDOWS:
            raise InvalidParameter(f"unknown field {name!r} in body: leave it out")


def parameters(body: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Returns the body's sampling parameters under kvern's names."""
    found = {name: body[name] for name in SamplingParams.__struct_fields__ if body.get(name) is not None}
    if body.get("max_completion_tokens") is not None:
        found["max_tokens"] = body["max_completion_tokens"]
    structured = structured_of(body)
    if structured is not None:
        found["structured"] = structured
    searching = body.get("use_beam_search")
    if searching is not None and not isinstance(searching, bool):
        raise InvalidParameter(f"use_beam_search is {shown(searching)}: it must be true or false")
    if searching:
        found.setdefault("beam_width", body.get("best_of") or body.get("n") or 1)
    if url == CHAT:
        wanted = found.pop("logprobs", False)
        if not isinstance(wanted, bool):
            raise InvalidParameter(
                f"logprobs is {shown(wanted)}: {CHAT} takes true or false, and top_logprobs a number"
            )
        most = typed(body, "top_logprobs", int, 0)
        if not 0 <= most <= MAX_LOGPROBS:
            raise InvalidParameter(f"top_logprobs is {most}: it must be at least 0 and at most {MAX_LOGPROBS}")
        if most and not wanted:
            raise InvalidParameter(f"top_logprobs is {most} without logprobs: set logprobs to true, or leave it out")
        if wanted:
            found["logprobs"] = most
    return found


def read_prompts(body: Mapping[str, Any], name: str = "prompt", most: int = MOST_PROMPTS) -> list[Prompt]:
    """Reads prompts from the field `name`: one text or list of token ids, or several. Raises HttpError."""
    prompt = body.get(name)
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(prompt, str) or (isinstance(prompt, list) and isinstance(first, int)):
        return [prompt]  # the ids are checked outside the event loop
    if isinstance(prompt, list) and isinstance(first, str | list):
        if len(prompt) > most:
            raise HttpError(400, f"{name} holds {len(prompt)} prompts: at most {most}", param=name)
        return list(prompt)
    raise wrong_value(name, prompt, "a text, a list of token ids, or a list of these")
