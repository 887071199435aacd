"""A model of Triton Inference Server with the inputs and outputs of Triton's vLLM backend, and conversations.

`kvern_model.py` beside it asks `kvern serve`; here is what is asked, and what Triton gets. `kvern triton` writes both.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from kvern_model import Refused, Request, whole
from kvern_model import TritonPythonModel as KvernModel

RETURNS = {
    "finish_reason": ("STRING", [-1]),
    "cumulative_logprob": ("FP32", [-1]),
    "num_input_tokens": ("UINT32", [1]),
    "num_output_tokens": ("UINT32", [-1]),
    "message": ("STRING", [-1]),
}
"""Outputs that a request asks for by an input `return_NAME`."""
OF_TRITON = re.compile(r"triton_|sequence_|binary_data|priority$|timeout$|headers$")
"""Beginnings of a request's parameters that speak to Triton."""


class TextRequest(Request):
    """A request with a text or a conversation."""

    _prefix = ""
    _prompt_tokens = 0
    _wanted: frozenset[str] = frozenset()

    def question(self) -> tuple[str, dict[str, Any]]:
        """The route of kvern and the body for it. Raises Refused."""
        body = self._fields()
        text, messages = self.value("text_input"), self.value("messages")
        if (text is None) == (messages is None):
            raise Refused("text_input and messages: give one of them, a text or a conversation as JSON")
        body["stream"] = streams = bool(self.value("stream", body.get("stream", False)))
        excluded = self.value("exclude_input_in_output", streams or text is None)
        if not excluded and (streams or text is None):
            raise Refused("exclude_input_in_output is false: a stream or conversation cannot repeat its input")
        self._prefix = "" if excluded else str(text)
        talk = None if messages is None else read("messages", messages, list)
        if images := self.values("image"):
            talk = with_images(talk or [{"role": "user", "content": text}], images)
        self._wanted = frozenset(name for name in RETURNS if self.value(f"return_{name}", False))
        if "cumulative_logprob" in self._wanted:
            body["logprobs"] = body.get("logprobs") or (talk is not None or 0)
        if {"num_input_tokens", "num_output_tokens"} & self._wanted:
            body["return_token_ids"] = True
        if talk is None:
            return "/v1/completions", body | {"prompt": text}
        return "/v1/chat/completions", body | {"messages": talk}

    def _fields(self) -> dict[str, Any]:
        """The fields of kvern's routes that the request has. Raises Refused."""
        given = self.value("sampling_parameters")
        body: dict[str, Any] = read("sampling_parameters", given or self.parameters() or "{}", dict)
        if given is None:
            body = {name: value for name, value in body.items() if not OF_TRITON.match(name)}
        if "lora_name" in body:
            body["model"] = body.pop("lora_name")
        if body.get("n") is not None:
            self.count = body["n"] = whole("n", body["n"])
        return body

    def outputs(self, news: Sequence[dict[str, Any]]) -> Any:
        """Yields each output's name, type and values: what is new in the chunks, or in the whole answer."""
        texts = [self._prefix] * self.count
        reasons = ["None"] * self.count
        tokens = [0] * self.count
        parts: list[bytes] = []
        for piece, choice in ((item, choice) for item in news for choice in item["choices"]):
            prompt = choice.get("prompt_token_ids") or piece.get("prompt_token_ids") or ()
            self._prompt_tokens = len(prompt) or self._prompt_tokens
            index = choice["index"]
            message = choice.get("delta", choice.get("message"))
            texts[index] += (choice["text"] if message is None else message.get("content")) or ""
            reasons[index] = str(choice["finish_reason"] or reasons[index])
            tokens[index] += len(choice.get("token_ids") or ())
            self.logprobs[index] += sum(logprobs_of(choice.get("logprobs") or {}))
            if "message" in self._wanted:
                parts.append(json.dumps(message).encode())
        yield "text_output", "STRING", [text.encode() for text in texts]
        found = {
            "finish_reason": [reason.encode() for reason in reasons],
            "cumulative_logprob": [self.logprobs[index] for index in range(self.count)],
            "num_input_tokens": [self._prompt_tokens],
            "num_output_tokens": tokens,
            "message": parts,
        }
        yield from ((name, RETURNS[name][0], found[name]) for name in RETURNS if name in self._wanted)


def read(name: str, text: str, kind: type) -> Any:
    """Reads a text in JSON. Raises Refused if it is not of that kind."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise Refused(f"{name} is no JSON ({error}): {text[:100]!r}") from None
    if not isinstance(found, kind):
        raise Refused(f"{name} is {text[:100]!r}: it must be a JSON {'list' if kind is list else 'object'}")
    return found


def with_images(messages: list[Any], images: Sequence[bytes]) -> list[Any]:
    """The conversation with images, in base64, in its last message."""
    content = messages[-1].get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    urls = [f"data:image/jpeg;base64,{image.decode()}" for image in images]
    found = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*messages[:-1], {**messages[-1], "content": [*found, *parts]}]


def logprobs_of(found: dict[str, Any]) -> list[float]:
    """The log-probabilities of new tokens, in the format of either route."""
    tokens = [item["logprob"] for item in found.get("content") or ()] or found.get("token_logprobs") or []
    return [value for value in tokens if value is not None]


class TritonPythonModel(KvernModel):
    """The model with these inputs and outputs."""

    INPUTS: ClassVar = {
        "text_input": ("STRING", [1]),
        "messages": ("STRING", [1]),
        "image": ("STRING", [-1]),
        "stream": ("BOOL", [1]),
        "sampling_parameters": ("STRING", [1]),
        "exclude_input_in_output": ("BOOL", [1]),
        **{f"return_{name}": ("BOOL", [1]) for name in RETURNS},
    }
    OUTPUTS: ClassVar = {"text_output": ("STRING", [-1]), **RETURNS}
    REQUEST: ClassVar = TextRequest
