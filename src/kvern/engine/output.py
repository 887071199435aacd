"""From sampled tokens to the answers that users see: text, stop strings, log-probabilities, n samples of one prompt."""

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvern.request.events import TokenEvent
from kvern.request.logprobs import LogprobRows, LogprobTables, PromptTables
from kvern.request.outputs import CompletionOutput, RequestOutput
from kvern.request.request import FinishReason, RequestSpec
from kvern.request.sampling_params import SamplingParams
from kvern.text.detokenizer import IncrementalDetokenizer
from kvern.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvern.engine.stop_strings import ScopedSearch, StopSearch

logger = logging.getLogger("kvern")


class Answer:
    """The growing text of one sequence, held back where it may be the beginning of a stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        params: SamplingParams,
        search: "StopSearch | ScopedSearch | None",
        index: int,
    ) -> None:
        """`search` looks for stop strings; None: there are none."""
        tables = LogprobTables(tokenizer.texts) if params.logprobs is not None else None
        self.output = CompletionOutput(index, logprobs=tables)
        self._params = params
        self._search = search
        self._eos_token_ids = tokenizer.eos_token_ids
        self._text = ""
        kept = frozenset(params.visible_token_ids or ())
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt, params.skip_special_tokens, kept)

    def add(self, event: TokenEvent) -> str | None:
        """Take the tokens of a step; the stop string that they complete, if any: those behind it are dropped."""
        if event.cumulative_logprob is not None:
            self.output.cumulative_logprob = event.cumulative_logprob
        accepted, rejected = event.predicted_tokens
        self.output.accepted_prediction_tokens += accepted
        self.output.rejected_prediction_tokens += rejected
        token_ids = event.token_ids
        last = len(token_ids) - 1
        if last > 0 and not self._params.stop_strings:
            self._add_tokens(event)
            token_ids = []
        for place, token_id in enumerate(token_ids):
            if event.logprobs is not None:
                self._add_logprobs(event.logprobs[place : place + 1] if last else event.logprobs)
            self.output.token_ids.append(token_id)
            if place < last or event.finish_reason != "stop" or self._params.include_stop_str_in_output:
                stop = self._grow(self._detokenizer.append([token_id]))
                if stop is not None:
                    self.end("stop", stop)
                    return stop
        if event.finish_reason is not None:
            is_eos = not self._params.ignore_eos and event.stop_reason in self._eos_token_ids
            self.end(event.finish_reason, None if is_eos else event.stop_reason)
        else:
            held_back = 0 if self._search is None else self._search.held_back
            self.output.text = self._text[: len(self._text) - held_back]
        return None

    def _add_tokens(self, event: TokenEvent) -> None:
        """Take several, in which nothing is to be found."""
        if event.logprobs is not None:
            self._add_logprobs(event.logprobs)
        self.output.token_ids.extend(event.token_ids)
        hidden = event.finish_reason == "stop" and not self._params.include_stop_str_in_output
        self._text += self._detokenizer.append(event.token_ids[: len(event.token_ids) - hidden])

    def _add_logprobs(self, rows: LogprobRows) -> None:
        output = self.output
        assert output.logprobs is not None
        output.logprobs.extend(rows)
        if not self.searched:
            for logprob in rows.own():
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprob

    @property
    def searched(self) -> bool:
        """True if a beam search makes the answer."""
        return self._params.beam_width is not None

    def end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End without another token."""
        if not isinstance(stop_reason, str):
            rest, late = self._detokenizer.flush(), None
            if reason in ("length", "stop"):
                late = self._grow(rest if reason == "length" else "", ended=True)
            if late is not None:
                reason, stop_reason = "stop", late
            elif reason != "length":
                self._text += rest
        self.output.text = self._text
        self.output.finish_reason = reason
        self.output.stop_reason = stop_reason

    def _grow(self, piece: str, ended: bool = False) -> str | None:
        """Write more; the stop string that ends in it and began first, if any: the text is cut there."""
        self._text += piece
        found = None if self._search is None else self._search.append(piece, ended)
        if found is None or len(self.output.token_ids) <= self._params.min_tokens > 0:
            return None
        place, stop = found
        self._text = self._text[: place + (len(stop) if self._params.include_stop_str_in_output else 0)]
        return stop


class OutputProcessor:
    """Turns the token events of all running requests into request outputs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._answers: dict[str, tuple[RequestOutput, Answer]] = {}

    def __len__(self) -> int:
        """Answers that have not ended."""
        return len(self._answers)

    def add(self, prompt: str | None, spec: RequestSpec) -> RequestOutput:
        """Announce a request, whose prompt was this text."""
        prompt_ids, params = spec.prompt.token_ids, spec.params
        searches = _searches(params)
        answers = [Answer(self._tokenizer, prompt_ids, params, search, index) for index, search in enumerate(searches)]
        output = RequestOutput(spec.request_id, prompt, list(prompt_ids), [answer.output for answer in answers])
        if params.prompt_logprobs is not None:
            told = LogprobTables(self._tokenizer.texts)
            output.prompt_logprobs = PromptTables(min(params.prompt_logprobs_from, len(prompt_ids)), told)
        self._answers |= {name: (output, answer) for name, answer in zip(spec.answer_ids, answers, strict=True)}
        return output

    def process(self, events: Iterable[TokenEvent]) -> tuple[list[RequestOutput], list[tuple[str, FinishReason, str]]]:
        """Returns the outputs that changed, and (answer id, reason, stop string or fault) of answers that the engine
        must end, or has ended for another reason."""
        changed: dict[str, RequestOutput] = {}
        stopped: list[tuple[str, FinishReason, str]] = []
        for event in events:
            if event.request_id not in self._answers:
                continue
            output, answer = self._answers[event.request_id]
            try:
                stop = self._take(event, output, answer)
            except Exception as error:
                logger.exception("the answer of request %s cannot be written", event.request_id)
                stop = f"the answer cannot be written: {type(error).__name__}"
                answer.output.finish_reason, answer.output.stop_reason = "abort", stop
            if stop is not None:
                stopped.append((event.request_id, answer.output.finish_reason or "stop", stop))
            if answer.output.finish_reason is not None:
                self._answers.pop(event.request_id, None)
            output.finished = all(item.finish_reason is not None for item in output.outputs)
            if event.token_ids or event.finish_reason is not None or stop is not None:
                changed[output.request_id] = output
        return list(changed.values()), stopped

    def _take(self, event: TokenEvent, output: RequestOutput, answer: Answer) -> str | None:
        """Let the answer grow; the stop string that it completes, if any."""
        if event.prompt_logprobs is not None and output.prompt_logprobs is not None and answer.output.index == 0:
            output.prompt_logprobs.told.extend(event.prompt_logprobs)
        output.embedding = output.embedding or event.embedding
        output.queue_seconds = max(output.queue_seconds, event.queue_seconds)
        if not event.token_ids:
            if event.finish_reason is not None:
                self._end_without_token(event, output, answer)
            return None
        output.cached_tokens = max(output.cached_tokens, event.cached_tokens)
        if sum(event.loaded_tokens.values()) >= sum(output.loaded_tokens.values()):
            output.loaded_tokens = dict(event.loaded_tokens) or output.loaded_tokens
        return answer.add(event)

    def _end_without_token(self, event: TokenEvent, output: RequestOutput, answer: Answer) -> None:
        """A step failed, a search found nothing more, or an encoder has read the text.

        What a search did find stays, or else one answer that says why there is none.
        """
        assert event.finish_reason is not None
        if answer.searched and (event.stop_reason is None or answer.output.index):
            answer.output.finish_reason = event.finish_reason
            output.outputs.remove(answer.output)
        else:
            answer.end(event.finish_reason, event.stop_reason)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests that were ended from outside; their answers keep what they have."""
        for request_id in request_ids:
            if request_id in self._answers:
                output, answer = self._answers.pop(request_id)
                answer.end("abort", None)
                output.finished = all(item.finish_reason is not None for item in output.outputs)


def _searches(params: SamplingParams) -> "list[StopSearch | ScopedSearch | None]":
    """A search for the request's stop strings in each of its answers."""
    if not params.stop_strings:
        return [None] * params.n
    from kvern.engine.stop_strings import StopStrings, search_of

    stop_strings = StopStrings(params.stop_strings)
    return [search_of(stop_strings, params.stop_scope) for _ in range(params.n)]
