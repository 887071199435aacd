"""Bodies of OpenAI's /v1/chat/completions and /v1/completions.

Beside OpenAI's own parameters a body may hold every field of ``SamplingParams``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvern.api.conversation import CHAT_FIELDS, ChatBody, read_chat_body
from kvern.api.errors import HttpError
from kvern.api.fields import COMMON_FIELDS, WITHOUT_EFFECT, CommonFields, read_common, sampling_params, typed
from kvern.api.forms import STRUCTURED, structured_of
from kvern.engine.inputs import Prompt
from kvern.errors import InvalidParameter, shown
from kvern.sampling_params import SamplingParams

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
COMPLETION_TOKENS = 16
"""OpenAI's default length of /v1/completions."""
MOST_PROMPTS = 256
# fmt: off
OWN_FIELDS = {
    "prompt", "max_completion_tokens", "top_logprobs", "logprobs", "use_beam_search", *STRUCTURED, *CHAT_FIELDS
}
# fmt: on
ONLY_VALUES: dict[str, tuple[object, ...]] = {
    "stream": (None, False),
    "stream_options": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "modalities": (None, ["text"]),
}
"""Fields of OpenAI's with the values that ask for nothing special."""
STREAMING = ("stream", "stream_options", "echo", "best_of")
"""Those of them that the server understands."""
FIELDS = frozenset(WITHOUT_EFFECT | OWN_FIELDS | set(ONLY_VALUES) | set(SamplingParams.__struct_fields__))
KNOWN = FIELDS | set(COMMON_FIELDS)


@dataclass(frozen=True)
class AnswerOptions:
    """How the answers of either route are to be written."""

    url: str = COMPLETIONS
    answers: int = 1
    """For each prompt: `n`. More are generated if `best_of` was given."""
    logprobs: bool = False
    include_reasoning: bool = True
    include_usage: bool = False
    """At the end of a stream."""
    echo: bool = False
    prompt_only: bool = False
    """`max_tokens` is 0: only the echo is wanted."""

    @property
    def is_chat(self) -> bool:
        """The answers continue a conversation."""
        return self.url == CHAT


@dataclass(frozen=True)
class CompletionBody:
    """What a body of either route asks for: the answers to a conversation, or to prompts."""

    conversation: ChatBody | None
    prompts: list[Prompt]
    params: SamplingParams
    common: CommonFields
    stream: bool
    options: AnswerOptions


def read_completion(body: Mapping[str, Any], url: str, defaults: SamplingParams | None = None) -> CompletionBody:
    """Check a body of CHAT or COMPLETIONS. Raises HttpError, InvalidRequest or InvalidParameter."""
    is_chat = url == CHAT
    _check_only_values(body, is_chat)
    echo = not is_chat and typed(body, "echo", bool, False)
    prompt_only = echo and body.get("max_tokens") == 0
    if defaults is None:
        defaults = SamplingParams() if is_chat else SamplingParams(max_tokens=COMPLETION_TOKENS)
    params = sampling_params(defaults, parameters(body, url) | ({"max_tokens": 1} if prompt_only else {}))
    answers, logprobs = params.n, params.logprobs is not None
    stream = typed(body, "stream", bool, False)
    if echo and logprobs:
        params = params.replace(prompt_logprobs=params.logprobs)
    best_of = answers if is_chat or body.get("use_beam_search") else typed(body, "best_of", int, answers)
    if best_of < answers or (best_of > answers and stream):
        message = f"best_of is {best_of} with n {answers}: it must not be smaller, and a stream cannot choose the best"
        raise HttpError(400, message, param="best_of")
    if best_of > answers:
        params = params.replace(n=best_of, logprobs=params.logprobs or 0)
    if echo and logprobs and stream:
        raise HttpError(400, "echo, logprobs and stream are set: ask for two of them at most", param="echo")
    conversation = read_chat_body(body) if is_chat else None
    options = AnswerOptions(
        url,
        answers,
        logprobs,
        conversation is None or conversation.include_reasoning,
        bool(typed(body, "stream_options", dict, {}).get("include_usage")),
        echo,
        prompt_only,
    )
    prompts = [] if is_chat else read_prompts(body)
    return CompletionBody(conversation, prompts, params, read_common(body), stream, options)


def _check_only_values(body: Mapping[str, Any], is_chat: bool) -> None:
    searching = bool(body.get("use_beam_search"))
    for name, values in ONLY_VALUES.items():
        if searching and name == "best_of":
            continue  # the number of beams
        if name in body and body[name] not in values and (name not in STREAMING or (is_chat and name == "best_of")):
            raise HttpError(400, f"{name} is {shown(body[name])}: this server does not do that", param=name)


def check_fields(body: Mapping[str, Any]) -> None:
    """Refuse by name what a file of requests cannot ask for, and what is not known. Raises InvalidParameter."""
    for name, value in body.items():
        if name in ONLY_VALUES and not (name == "best_of" and body.get("use_beam_search")):
            if value not in ONLY_VALUES[name]:
                raise InvalidParameter(f"{name} is {shown(value)}: a batch does not support that; leave it out")
        elif name not in FIELDS:
            raise InvalidParameter(f"unknown field {name!r} in body: leave it out")


def parameters(body: Mapping[str, Any], url: str) -> dict[str, Any]:
    """The body's sampling parameters under kvern's names."""
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
        if wanted:
            found["logprobs"] = body.get("top_logprobs") or 0
    return found


def read_prompts(body: Mapping[str, Any]) -> list[Prompt]:
    """The prompts of a body: one text or list of token ids, or several. Raises HttpError."""
    prompt = body.get("prompt")
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(prompt, str) or (isinstance(prompt, list) and isinstance(first, int)):
        return [prompt]  # whether all of them are ids is looked at outside the event loop
    if isinstance(prompt, list) and isinstance(first, str | list):
        if len(prompt) > MOST_PROMPTS:
            raise HttpError(400, f"prompt holds {len(prompt)} prompts: at most {MOST_PROMPTS}", param="prompt")
        return list(prompt)
    raise HttpError(
        400, f"prompt is {shown(prompt)}: it must be a text, a list of token ids, or a list of these", param="prompt"
    )
