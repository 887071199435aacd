"""The model `tensorrt_llm` of a repository in the form of Triton's TensorRT-LLM backend: token ids in, token ids out.

It lies as model.py beside `kvern_model.py`, which asks `kvern serve`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from kvern_model import Refused, Request, whole
from kvern_model import TritonPythonModel as KvernModel

FIELDS = {
    "temperature": ("FP32", "temperature"),
    "runtime_top_k": ("INT32", "top_k"),
    "runtime_top_p": ("FP32", "top_p"),
    "min_length": ("INT32", "min_tokens"),
    "repetition_penalty": ("FP32", "repetition_penalty"),
    "presence_penalty": ("FP32", "presence_penalty"),
    "frequency_penalty": ("FP32", "frequency_penalty"),
    "random_seed": ("UINT64", "seed"),
    "request_output_len": ("INT32", "max_tokens"),
}
"""Inputs of one number, and kvern's names of them."""


class TokensRequest(Request):
    """A request with token ids; outputs have dimensions for the batch, which is one request, and for beams."""

    def question(self) -> tuple[str, dict[str, Any]]:
        """The route of kvern and the body for it. Raises Refused."""
        ids = self.values("input_ids")
        length = self.value("input_lengths", len(ids))
        if not 0 < length <= len(ids):
            raise Refused(f"input_lengths is {length}: it must be 1 to the {len(ids)} of input_ids")
        given = {ours: self.value(name) for name, (_, ours) in FIELDS.items()}
        body = {ours: value for ours, value in given.items() if value is not None}
        if (seed := body.get("seed", 0)) >= 1 << 63:  # kvern's seeds have a sign, and -1 is a random one
            body["seed"] = min(seed - (1 << 64), -2)
        self.count = whole("beam_width", self.value("beam_width", 1))
        if self.count > 1:
            body |= {"use_beam_search": True, "n": self.count, "length_penalty": self.value("len_penalty", 1.0)}
        end = self.value("end_id")
        if end is not None:
            body |= {"ignore_eos": True} | ({"stop_token_ids": [end]} if end >= 0 else {})
        for name, ours in (("stop_words", "stop"), ("bad_words", "bad_words")):
            if words := [word.decode() for word in self.values(name) if word]:
                body[ours] = words
        if self.value("return_log_probs", False):
            body["logprobs"] = 0
        self._wants_logprobs = "logprobs" in body
        body |= {"prompt": ids[:length], "stream": bool(self.value("streaming", False)), "return_token_ids": True}
        return "/v1/completions", body

    def outputs(self, news: Sequence[dict[str, Any]]) -> Any:
        """Yields each output's name, type and values: what is new in the chunks, or in the whole answer."""
        ids: list[list[int]] = [[] for _ in range(self.count)]
        texts = [""] * self.count
        logprobs: list[list[float]] = [[] for _ in range(self.count)]
        for choice in (choice for content in news for choice in content["choices"]):
            index = choice["index"]
            ids[index] += choice["token_ids"]
            texts[index] += choice["text"]
            logprobs[index] += (choice["logprobs"] or {}).get("token_logprobs", ())
        longest = max(map(len, ids))
        yield "output_ids", "INT32", [[row + [0] * (longest - len(row)) for row in ids]]
        yield "sequence_length", "INT32", [[len(row) for row in ids]]
        yield "text_output", "STRING", [[text.encode() for text in texts]]
        if self._wants_logprobs:
            for index, values in enumerate(logprobs):
                self.logprobs[index] += sum(values)
            yield "output_log_probs", "FP32", [[row + [0.0] * (longest - len(row)) for row in logprobs]]
            yield "cum_log_probs", "FP32", [[self.logprobs[index] for index in range(self.count)]]


class TritonPythonModel(KvernModel):
    """The model with the inputs and outputs of `tensorrt_llm`, and the text beside the ids."""

    INPUTS: ClassVar = {
        "input_ids": ("INT32", [-1]),
        "input_lengths": ("INT32", [1]),
        **{name: (kind, [1]) for name, (kind, _) in FIELDS.items()},
        "streaming": ("BOOL", [1]),
        "beam_width": ("INT32", [1]),
        "len_penalty": ("FP32", [1]),
        "end_id": ("INT32", [1]),
        "pad_id": ("INT32", [1]),
        "stop_words": ("STRING", [-1]),
        "bad_words": ("STRING", [-1]),
        "return_log_probs": ("BOOL", [1]),
    }
    OUTPUTS: ClassVar = {
        "output_ids": ("INT32", [-1, -1]),
        "sequence_length": ("INT32", [-1]),
        "text_output": ("STRING", [-1]),
        "output_log_probs": ("FP32", [-1, -1]),
        "cum_log_probs": ("FP32", [-1]),
    }
    NEEDED: ClassVar = frozenset({"input_ids", "request_output_len"})
    MOST: ClassVar = 1
    REQUEST: ClassVar = TokensRequest
