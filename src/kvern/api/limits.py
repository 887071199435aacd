"""Limits of one request: higher than any use needs, low enough for the server."""

from kvern.errors import InvalidParameter
from kvern.request.sampling_params import SamplingParams

LONGEST_LISTS = {
    "stop": 64,
    "stop_token_ids": 1024,
    "visible_token_ids": 1024,
    "bad_words": 1024,
    "dry_sequence_breakers": 32,
    "allowed_token_ids": 1 << 20,
    "logit_bias": 4096,
}
MOST_ENTRIES = 1 << 21
"""The limit of all entries of these lists, times the answers: each answer sends its own to the engine."""
LONGEST_STOP = 1024
"""The limit of a stop string or bad word in characters."""
LONGEST_BREAKER = 40
"""The limit of one of `dry_sequence_breakers` in characters: each is compared with the text at every token."""
MOST_SAMPLES = 128
MOST_SEQUENCES = 1024
"""The limit of prompts times `n` (or beams) in one request."""
MOST_LOGPROBS = 8192
"""The limit of answers times log-probabilities for each in one step; an entry takes some 100 bytes."""
MOST_PROMPT_LOGPROBS = 1 << 18
"""The limit for all prompts of a request; an entry takes some 200 bytes in memory and 20 on the wire."""


def check_bounds(params: SamplingParams, prompts: int) -> None:
    """Refuses parameters that exceed the limits for so many prompts. Raises InvalidParameter."""
    for name, most in LONGEST_LISTS.items():
        value = getattr(params, name)
        if value is not None and not isinstance(value, str) and len(value) > most:
            raise InvalidParameter(f"{name} has {len(value)} entries: this server takes {most} at most")
    for names, words, longest in (
        ("stop or bad_words hold", (*params.stop_strings, *(params.bad_words or ())), LONGEST_STOP),
        ("dry_sequence_breakers holds", params.dry_sequence_breakers or (), LONGEST_BREAKER),
    ):
        for word in words:
            if len(word) > longest:
                raise InvalidParameter(f"{names} a text of {len(word)} characters: at most {longest}")
    if params.n > MOST_SAMPLES:
        raise InvalidParameter(f"n is {params.n}: this server takes {MOST_SAMPLES} at most")
    sequences, reported = params.sequences, 1 + (params.logprobs or 0)
    entries = sum(len(getattr(params, name) or ()) for name in LONGEST_LISTS)
    if prompts * sequences * entries > MOST_ENTRIES:
        raise InvalidParameter(
            f"{prompts * sequences} answers with {entries} stop strings, banned words, biases and token ids each are "
            f"more than {MOST_ENTRIES}: ask for fewer answers at once"
        )
    if prompts * sequences > MOST_SEQUENCES:
        name = "n" if params.beam_width is None else "beam_width"
        raise InvalidParameter(
            f"{prompts} prompts times {name} {sequences} are {prompts * sequences} answers: this server gives "
            f"{MOST_SEQUENCES} at most to one request"
        )
    if prompts * sequences * reported > MOST_LOGPROBS:
        raise InvalidParameter(
            f"logprobs is {params.logprobs}: {prompts * sequences} answers with {reported} each are "
            f"{prompts * sequences * reported} in a step, and this server gives {MOST_LOGPROBS}: ask for fewer"
        )


def reported_by(prompt_tokens: int, params: SamplingParams) -> int:
    """Returns the number of log-probabilities that are reported for a prompt of so many tokens."""
    if params.prompt_logprobs is None:
        return 0
    return max(prompt_tokens - params.prompt_logprobs_from, 0) * (1 + params.prompt_logprobs)


def check_reported(entries: int) -> None:
    """Refuses more log-probabilities of prompts than the server can hold. Raises InvalidParameter."""
    if entries > MOST_PROMPT_LOGPROBS:
        raise InvalidParameter(
            f"prompt_logprobs asks for {entries} log-probabilities: this server gives {MOST_PROMPT_LOGPROBS} at most "
            "to one request; send fewer prompts at once, ask for fewer, or use prompt_logprobs_from"
        )
