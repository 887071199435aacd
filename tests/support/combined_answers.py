"""When two answers of combined features are the same."""

import pytest

from kvern.request.outputs import CompletionOutput

CLOSE = 2e-3
"""Log-probabilities of whole answers that are computed in other batches."""


def check_same(answer: CompletionOutput, expected: CompletionOutput) -> None:
    """Checks that two answers have the same tokens, text, content, calls and end."""
    assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
    assert (answer.finish_reason, answer.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert pieces(answer) == pieces(expected)
    if answer.cumulative_logprob is not None and expected.cumulative_logprob is not None:
        assert answer.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=CLOSE)


def pieces(answer: CompletionOutput) -> tuple[str, list[tuple[str, str]]]:
    assert answer.message is not None
    return answer.message.content, [(call.name, call.arguments) for call in answer.message.tool_calls]
