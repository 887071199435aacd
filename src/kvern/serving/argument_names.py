"""Arguments of the verbs of LLM and AsyncLLM by the names that they have in vLLM."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

from kvern.errors import InvalidRequest, did_you_mean, shown
from kvern.serving.chats import ChatOptions

P = ParamSpec("P")
R = TypeVar("R")
RENAMED = {"use_tqdm": "progress", "chat_template_kwargs": "variables", "params": "sampling_params"}
_FORM = "the reader of the template finds the form of contents itself; leave it out"
REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "use_tqdm": ((None, False), "answers that come together have no progress; leave it out"),
    "lora_request": ((None,), "load the adapter with LLM(adapters={NAME: FOLDER}), and give adapter=NAME"),
    "prompt_token_ids": ((None,), "give the token ids as prompts"),
    "priority": ((None,), "requests of one call begin in their order; put the urgent ones first"),
    "chat_template": ((None,), "give it to LLM(..., chat_template=...)"),
    "chat_template_content_format": ((None, "auto", "string", "openai"), _FORM),
    "tokenization_kwargs": ((None, {}), "give truncate_prompt_tokens"),
    "pooling_params": ((None,), "give dimensions, or truncate_prompt_tokens"),
    "mm_processor_kwargs": ((None, {}), "images are read as the model's folder says"),
    "guided_options_request": ((None,), "give structured among the sampling parameters"),
    "prompt_adapter_request": ((None,), "kvern has no prompt adapters"),
    "request_id": ((None,), "stream() is the call whose output grows, and leaving the loop ends it; leave the id out"),
}
"""vLLM's names of arguments that kvern does not have, with the values that change nothing, and the advice."""
BY_POSITION = {
    "generate": "a request has no id to give; stream(prompt, sampling_params) is the call whose output grows",
    "stream": "a request has no id to give; leaving the loop ends it",
    "score": "it gives log-likelihoods of (context, continuation); relevance([(query, text), ...]) compares texts",
}
"""The advice for verbs that have more arguments by position in vLLM."""


def takes_other_names(verb: Callable[P, R]) -> Callable[P, R]:
    """Returns a verb that takes vLLM's names too. It raises InvalidRequest for a name that means nothing."""
    parameters = inspect.signature(verb).parameters.values()
    most = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    known = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known |= ChatOptions.__annotations__.keys()

    @functools.wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > most:
            advice = BY_POSITION.get(verb.__name__, "name the others")
            raise InvalidRequest(f"{verb.__name__} has {most - 1} arguments by position, not {len(args) - 1}: {advice}")
        if kwargs.keys() <= known:
            return verb(*args, **kwargs)
        named: dict[str, Any] = own_arguments(verb.__name__, kwargs, known)
        return verb(*args, **named)

    return call


def own_arguments(verb: str, given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Returns a verb's arguments by the names in `known`. Raises InvalidRequest."""
    found = {name: value for name, value in given.items() if name in known}
    for name, value in given.items():
        ours = RENAMED.get(name, name)
        if name in known:
            continue
        if ours in known:
            if ours in found:
                raise InvalidRequest(f"{verb} has {ours} and {name}, which mean the same: give one of them")
            found[ours] = bool(value) if ours == "progress" else value
        elif name not in REFUSED:
            raise InvalidRequest(f"{verb} has no argument {name!r}{did_you_mean(name, known)}")
        elif value not in REFUSED[name][0]:
            raise InvalidRequest(f"{name} is {shown(value)}: {REFUSED[name][1]}")
    return found
