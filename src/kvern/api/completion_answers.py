"""Answers of OpenAI's /v1/chat/completions and /v1/completions, whole or as chunks."""

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvern.api.completions import AnswerOptions
from kvern.api.conversation import assistant_message, finish_reason
from kvern.plugins import imported
from kvern.request.outputs import CompletionOutput, RequestOutput
from kvern.text.tokenizer import Tokenizer
from kvern.tools.chat import ChatRequest
from kvern.version import __version__

if TYPE_CHECKING:
    from kvern.api.logprobs import LogprobWriter


def choice_of(
    completion: CompletionOutput,
    chat: ChatRequest | None,
    options: AnswerOptions,
    tokenizer: Tokenizer,
    told: "LogprobWriter | None" = None,
) -> dict[str, Any]:
    """Returns a whole answer to a conversation or a text, without log-probabilities where it echoes the prompt.

    `told` writes its log-probabilities, if it has begun.
    """
    choice: dict[str, Any] = {"index": completion.index}
    ended: str | None = completion.finish_reason
    if chat is None:
        choice["text"] = completion.text
    else:
        message = chat.message(completion.text)
        choice["message"] = assistant_message(message, options.include_reasoning, options.prefix, options.custom_tools)
        ended = finish_reason(completion, message)
    choice["logprobs"] = None
    if options.logprobs is not None and not options.echo:
        told = told or imported("kvern.api.logprobs:LogprobWriter")(completion, options, tokenizer, chat is not None)
        choice["logprobs"] = told.whole()
    choice |= {"finish_reason": ended, "stop_reason": completion.stop_reason}
    if options.token_ids:
        choice["token_ids"] = completion.token_ids
    return choice


def completion_details(thought: int, answers: Sequence[CompletionOutput]) -> dict[str, Any]:
    """Returns a part of OpenAI's usage: reasoning tokens of the answers, and tokens of their predictions."""
    details = {
        "reasoning_tokens": thought,
        "accepted_prediction_tokens": sum(answer.accepted_prediction_tokens for answer in answers),
        "rejected_prediction_tokens": sum(answer.rejected_prediction_tokens for answer in answers),
    }
    return {"completion_tokens_details": details}


FINGERPRINT = f"kvern-{__version__}"
"""Answers with the same seed are the same under one fingerprint, model and options.

The version of weights that changed while the model served follows it."""


class Versioned(Protocol):
    """Weights of a served model; `version` is empty for those in its folder."""

    version: str


class CompletionWriter:
    """Writes the answers to one body; `chat` reads answers to a conversation, `weights` compute them."""

    def __init__(
        self,
        options: AnswerOptions,
        model: str,
        tokenizer: Tokenizer,
        chat: ChatRequest | None,
        weights: Versioned | None = None,
    ) -> None:
        self.options = options
        self._weights = weights
        self._model = model
        self.tokenizer = tokenizer
        self.chat = chat
        self._told: dict[int, LogprobWriter] = {}
        """The log-probabilities of answers that grow, by the objects' ids."""
        self._created, self._identity = int(time.time()), options.request_id or uuid.uuid4().hex

    @property
    def lacks(self) -> tuple[str, ...]:
        """`ChatRequest.lacks`."""
        return () if self.chat is None else self.chat.lacks

    def answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Returns all answers."""
        options = self.options
        choices = []
        for number, output in enumerate(outputs):
            for index, item in enumerate(best(output.outputs, options.answers)):
                choice = choice_of(item, self.chat, options, self.tokenizer, self._told.get(id(item)))
                choice["index"] = number * options.answers + index
                if options.echo:
                    self._echo(choice, item, output)
                if not options.is_chat:
                    choice |= of_prompt(output, options)
                choices.append(choice)
        head = self.head("chat.completion" if options.is_chat else "text_completion")
        head |= of_prompt(outputs[0], options) if options.is_chat else {}
        counts = usage(outputs, 0 if options.prompt_only else None, self.chat) | details(outputs, self.chat)
        return {**head, **self.server, "choices": choices, "usage": counts}

    def head(self, kind: str) -> dict[str, Any]:
        """Returns the first fields of every answer and chunk."""
        prefix = "chatcmpl" if self.options.is_chat else "cmpl"
        return {"id": f"{prefix}-{self._identity}", "object": kind, "created": self._created, "model": self._model}

    @property
    def server(self) -> dict[str, Any]:
        """Fields that describe the server, for whole answers and the last chunk of a choice: as it is then."""
        tier = {"service_tier": "default"} if self.options.service_tier else {}
        version = "" if self._weights is None else self._weights.version
        return {"system_fingerprint": f"{FINGERPRINT}-{version}" if version else FINGERPRINT, **tier}

    def prompt(self, output: RequestOutput) -> str:
        """Returns the text of a prompt."""
        return output.prompt if output.prompt is not None else self.tokenizer.decode(output.prompt_token_ids)

    def _echo(self, choice: dict[str, Any], answer: CompletionOutput, output: RequestOutput) -> None:
        """Puts the prompt before the answer, and the prompt's log-probabilities before the answer's."""
        prompt_only = self.options.prompt_only
        choice["text"] = self.prompt(output) + ("" if prompt_only else choice["text"])
        if self.options.logprobs is not None and answer.logprobs is not None:
            with_prompt = imported("kvern.api.logprobs:with_prompt")
            choice["logprobs"] = with_prompt(answer, output, self.options, self.tokenizer)

    def write_some(self, outputs: Sequence[RequestOutput]) -> int:
        """Encodes log-probabilities of a few tokens of answers that grow. Returns how many there were."""
        if self.options.logprobs is None or self.options.echo:
            return 0
        return next((count for output in outputs for item in output.outputs if (count := self._write(item))), 0)

    def _write(self, item: CompletionOutput) -> int:
        if (told := self._told.get(id(item))) is None:
            make = imported("kvern.api.logprobs:LogprobWriter")
            told = self._told[id(item)] = make(item, self.options, self.tokenizer, self.chat is not None)
        return told.write_some()


def best(answers: list[CompletionOutput], count: int) -> list[CompletionOutput]:
    """Returns the `count` answers with the highest mean log-probability of their tokens."""
    if len(answers) == count:
        return answers
    return sorted(answers, key=lambda item: -(item.cumulative_logprob or 0.0) / max(len(item.token_ids), 1))[:count]


def of_prompt(output: RequestOutput, options: AnswerOptions) -> dict[str, Any]:
    """Returns what the request wants of the prompt: in the answer to a conversation, in each choice for texts."""
    found: dict[str, Any] = {"prompt_token_ids": output.prompt_token_ids} if options.token_ids else {}
    if options.prompt_logprobs:
        found["prompt_logprobs"] = imported("kvern.api.logprobs:prompt_tables")(output)
    return found


def usage(
    outputs: Sequence[RequestOutput], generated: int | None = None, chat: ChatRequest | None = None
) -> dict[str, Any]:
    """Counts the tokens of all prompts and answers, of prompts that came from the cache, and of a chat's images."""
    return {
        **token_counts(outputs, generated),
        "prompt_tokens_details": {**cached_counts(outputs), **image_tokens(chat)},
    }


def cached_counts(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Counts the tokens of prompts that were cached, with a KV tier also by where they were, as SGLang has it."""
    found: dict[str, Any] = {"cached_tokens": sum(output.cached_tokens for output in outputs)}
    by_place: Counter[str] = Counter()
    for output in outputs:
        by_place.update(output.cached_tokens_details)
    return found | ({"cached_tokens_details": dict(by_place)} if by_place else {})


def image_tokens(chat: ChatRequest | None) -> dict[str, int]:
    """Returns the count of a conversation's image tokens, for details of the prompt's tokens; empty without images."""
    return {"image_tokens": chat.image_tokens} if chat is not None and chat.image_tokens else {}


def details(outputs: Sequence[RequestOutput], chat: ChatRequest | None) -> dict[str, Any]:
    """Returns the part of the usage that counts kinds of tokens in all answers to a conversation."""
    if chat is None:
        return {}
    answers = [item for output in outputs for item in output.outputs]
    return completion_details(sum(chat.reasoning_tokens(item.token_ids) for item in answers), answers)


def token_counts(outputs: Sequence[RequestOutput], generated: int | None = None) -> dict[str, Any]:
    """Counts the tokens of all prompts and answers."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    if generated is None:
        generated = sum(len(item.token_ids) for output in outputs for item in output.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
