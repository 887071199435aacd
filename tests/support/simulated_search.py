"""The result of an exhaustive beam search on the simulated model."""

import math

from kvern.request.request import Request
from tests.support.simulated_device import extend_key, first_key, simulated_logprobs


def searched_answers(request: Request) -> list[tuple[list[int], str]]:
    """Tokens and ending of what a beam search finds, best first: all continuations of all beams, one step at a time."""
    params, stop, length = request.params, request.spec.stop_token_ids, 0
    width, penalty = params.beam_width or 0, params.length_penalty
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int], str]] = []
    prompt = first_key(request)
    for token in request.token_ids[: request.prompt_length]:
        prompt = extend_key(prompt, token)
    while beams:
        length += 1
        found = []
        for total, tokens in beams:
            key = prompt
            for token in tokens:
                key = extend_key(key, token)
            logprobs = simulated_logprobs(key).items()
            found += [(total + value, [*tokens, token]) for token, value in logprobs if value > -math.inf]
        found.sort(reverse=True)
        last = length == request.max_tokens
        ended += [
            (total / length**penalty, tokens, "stop" if tokens[-1] in stop else "length")
            for total, tokens in found[:width]
            if last or tokens[-1] in stop
        ]
        ended = sorted(ended, key=lambda item: -item[0])[:width]
        beams = [item for item in found if not last and item[1][-1] not in stop][:width]
        if beams and len(ended) == width:
            most = request.max_tokens if params.early_stopping == "never" and penalty > 0 else length
            if params.early_stopping is True or beams[0][0] / most**penalty <= ended[-1][0]:
                break
    return [(tokens, reason) for _, tokens, reason in ended[: params.n]]
