"""Names of vLLM's and transformers' Python APIs: what they are here, or why there is no such thing."""

from collections.abc import Collection, Mapping
from typing import Any

from kvern.errors import InvalidParameter, did_you_mean, shown
from kvern.request.other_names import RENAMED

IN_PYTHON = {"structured_outputs": "structured", "guided_decoding": "structured"}
"""Names of vLLM's SamplingParams that are no fields of its HTTP API."""
_TEXT = "the text is made with the tokens, which are token_ids of the answer; leave it out"
REFUSED_IN_PYTHON: Mapping[str, tuple[tuple[object, ...], str]] = {
    "best_of": ((None,), "n answers are all that are drawn; ask for n, and choose by cumulative_logprob"),
    "detokenize": ((True,), _TEXT),
    "truncate_prompt_tokens": ((None,), "it is an argument of generate, embed and classify; give it there"),
    "output_kind": ((None,), "LLM.generate gives whole answers, and LLM.stream growing ones; leave it out"),
    "extra_args": ((None, {}), "give logits_processors: arguments by the processors' names"),
    "use_beam_search": ((None, False), "give beam_width, or call beam_search"),
    "do_sample": ((None, True), "give temperature 0"),
    "flat_logprobs": ((False,), "log-probabilities are lists of mappings; leave it out"),
    "spaces_between_special_tokens": ((True, False), ""),
    "skip_clone": ((True, False), ""),
    "thinking_token_budget": ((None,), "it is thinking_budget, an argument of chat"),
    "skip_reading_prefix_cache": ((None, False), "call reset_prefix_cache() before"),
    "repetition_detection": ((None,), "give repetition_penalty or dry_multiplier"),
}
"""Names of vLLM's and transformers' parameters with the values that change nothing, and the advice of the refusal."""
MISSING = {
    "sleep": "close it and make another one, which is ready in seconds",
    "wake_up": "there is no sleep: make another LLM, which is ready in seconds",
    "collective_rpc": "kvern's ranks take steps alone, no calls",
    "apply_model": "the model is in a process of its own as often as not: read weights from its folder",
    "start_profile": "use torch.profiler around the calls",
    "stop_profile": "use torch.profiler around the calls",
    "get_metrics": "statistics() has the engine's counters",
    "reward": "score() and relevance() judge texts",
    "llm_engine": "LLM has the engine's verbs itself, and max_model_len, config and spec",
    "model_config": "max_model_len, config and spec describe the model",
    "set_tokenizer": "give tokenizer=FOLDER to LLM",
    "from_engine_args": "give the arguments to the class itself",
    "add_request": "stream() is a request, and leaving its loop ends it",
    "abort": "leaving the loop of stream(), or cancelling the task, ends a request",
    "shutdown": "it is close()",
    "check_health": "calls raise EngineUnavailable if engines keep dying",
    "errored": "calls raise EngineUnavailable if engines keep dying",
    "add_lora": "it is load_adapter(NAME, FOLDER)",
    "metrics": "queue_seconds is the wait before the first step; statistics() has the engine's counters",
    "lora_request": "adapters are arguments of calls, and outputs come in the order of the prompts",
    "sequences": "beams are outputs, whose text, token_ids and cumulative_logprob are those after the prompt",
    "encoder_prompt": "a prompt has one part",
    "encoder_prompt_token_ids": "a prompt has one part",
    "clone": "parameters do not change; replace(NAME=VALUE) returns others",
}
"""vLLM's attributes that LLM, AsyncLLM and outputs do not have, and what there is instead."""


def missing(owner: str, name: str) -> AttributeError:
    """Returns the error for an attribute that there is not."""
    instead = f": {MISSING[name]}" if name in MISSING else ""
    return AttributeError(f"{owner!r} object has no attribute {name!r}{instead}")


def own_parameters(values: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Returns parameters by the names in `known`. Raises InvalidParameter for a name that means none of them."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        ours = name if name in known else (RENAMED | IN_PYTHON).get(name)
        if ours is None:
            _refuse(name, value, known)
        elif ours in found and found[ours] != value:
            raise InvalidParameter(f"{ours} is {shown(found[ours])} and {name} {shown(value)}: give one of them")
        else:
            found[ours] = value
    return found


def _refuse(name: str, value: object, known: Collection[str]) -> None:
    """Raises InvalidParameter unless the value of the name changes nothing."""
    if name not in REFUSED_IN_PYTHON:
        raise InvalidParameter(f"there is no sampling parameter {name!r}{did_you_mean(name, [*known, *RENAMED])}")
    nothing, advice = REFUSED_IN_PYTHON[name]
    if value not in nothing:
        raise InvalidParameter(f"{name} is {shown(value)}: {advice}")
