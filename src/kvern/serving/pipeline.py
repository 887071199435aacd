"""Calls in the form of transformers' text-generation pipelines: `llm("text", max_new_tokens=20)`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvern.errors import InvalidParameter
from kvern.request.outputs import RequestOutput
from kvern.request.sampling_params import SamplingParams, params_of

NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "num_return_sequences": "n"}
Answer = Callable[[Sequence[Any], SamplingParams], list[RequestOutput]]


def generated(inputs: Any, options: Mapping[str, Any], generate: Answer, chat: Answer) -> list[Any]:
    """Answers a text, a conversation, or a list of either.

    Returns a list of {"generated_text": ...}, one for each answer, or such a list for each of several inputs: the text
    with its answer, or the conversation with the answer's message; with `return_full_text=False` the answer alone.
    Raises InvalidParameter and what the functions raise.
    """
    single = isinstance(inputs, str) or _is_conversation(inputs)
    several = [inputs] if single else list(inputs)
    texts = all(isinstance(item, str) for item in several)
    given = dict(options)
    full = given.pop("return_full_text", True)
    samples = given.pop("do_sample", True)
    for theirs, ours in NAMES.items():
        if theirs in given:
            given[ours] = given.pop(theirs)
    if not samples:
        if given.get("temperature"):
            raise InvalidParameter(f"do_sample is false and temperature {given['temperature']}: give one of them")
        given["temperature"] = 0
    outputs = (generate if texts else chat)(several, params_of(given))
    answers = [
        [{"generated_text": _text(item, answer.text, full)} for answer in output.outputs]
        for item, output in zip(several, outputs, strict=True)
    ]
    return answers[0] if single else answers


def _is_conversation(inputs: Any) -> bool:
    return bool(inputs) and isinstance(inputs, Sequence) and isinstance(inputs[0], Mapping)


def _text(asked: Any, answer: str, full: bool) -> Any:
    if not full:
        return answer
    return asked + answer if isinstance(asked, str) else [*asked, {"role": "assistant", "content": answer}]
