"""Fields that an API does not know: those of other engines, and misspellings.

    RENAMED                               read under kvern's name
    REFUSED, or a name about sampling     400, unless the value changes nothing
    a misspelling of one of these         400
    any other                             ignored, and named in a header of the answer

It is loaded with the first body that has one.
"""

import difflib
import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from kvern.api.chat_fields import CHAT_FIELDS
from kvern.api.errors import HttpError
from kvern.api.fields import Refused, check_refused, typed
from kvern.api.forms import STRUCTURED
from kvern.api.other_names import WINDOWS
from kvern.errors import shown
from kvern.request.other_names import RENAMED
from kvern.request.sampling_params import SamplingParams

_SAMPLING = "this server has no such sampling; leave it out"
_ADAPTER = "an adapter is asked for by its name, as model"
_BESIDE = "send its fields beside the others"
_LOGPROBS = "ask for logprobs, and of conversations for top_logprobs"
_CHAT = "it is of conversations; ask /v1/chat/completions"
REFUSED_SAMPLING: Refused = {
    "mirostat": ((0,), _SAMPLING),
    "mirostat_mode": ((0,), _SAMPLING),
    "tfs_z": ((1,), _SAMPLING),
    "tfs": ((1,), _SAMPLING),
    "min_keep": ((0, 1), _SAMPLING),
    "guidance_scale": ((1,), _SAMPLING),
    "cfg_scale": ((1,), _SAMPLING),
    "encoder_repetition_penalty": ((1,), _SAMPLING),
    "penalize_nl": ((True,), "penalties are of all tokens; give the line break's a logit_bias"),
    "penalize_newline": ((True,), "penalties are of all tokens; give the line break's a logit_bias"),
    **dict.fromkeys(("samplers", "sampler_order", "sampler_priority"), (([], ""), "the order of filters is fixed")),
    **dict.fromkeys(("lora", "lora_path", "lora_request", "lora_adapter", "adapter_id"), (([], ""), _ADAPTER)),
}
"""Fields with the values that change nothing, and the advice of the refusal."""
REFUSED: Refused = {
    **REFUSED_SAMPLING,
    **dict.fromkeys(("n_probs", "top_n_tokens"), ((0,), _LOGPROBS)),
    **dict.fromkeys(("options", "parameters", "sampling_params", "generation_config"), (({},), _BESIDE)),
    **dict.fromkeys(("images", "image_data", "multi_modal_data"), (([], {}), "this model takes text only")),
    **dict.fromkeys(("custom_logit_processor", "logits_processor"), (([], ""), "send logits_processors, by name")),
    **dict.fromkeys(("extra_args", "vllm_xargs", "custom_params"), (({},), "send logits_processors, by name")),
    **dict.fromkeys(("t_max_predict_ms", "t_max_prompt_ms"), ((0, -1), "send timeout, in seconds")),
    **dict.fromkeys(CHAT_FIELDS, ((False, [], {}, ""), _CHAT)),
    "tool_choice": (("none", "auto"), _CHAT),
    "parallel_tool_calls": ((True, False), _CHAT),
    "add_generation_prompt": ((True,), _CHAT),
    "include_reasoning": ((True, False), _CHAT),
    "prompt": (("", []), "it is of /v1/completions; send messages"),
    "input_ids": (([],), "send token ids as prompt to /v1/completions"),
    "system": (("",), "send a message of role system"),
    "template": (("",), "the model's own is used"),
    "num_beams": ((1,), "send beam_width, or use_beam_search"),
    "n": ((1,), "this API gives one answer; ask for several with /v1/chat/completions"),
    **dict.fromkeys(
        ("logprobs", "prompt_logprobs"), ((False, 0), "ask for them as this API does, or with /v1/completions")
    ),
    "prompt_logprobs_from": ((1,), "ask /v1/completions for prompt_logprobs"),
    "think": ((), "send enable_thinking, or reasoning_effort"),
    "separate_reasoning": ((True,), "thoughts are told apart; add them to the answer yourself"),
    "detokenize": ((True,), "send return_token_ids for ids beside the text"),
    "return_hidden_states": ((False,), "this server shows none"),
    "negative_prompt": (("",), _SAMPLING),
    "plugins": (([],), "this server has none"),
    "enable_search": ((False,), "this server searches nothing; give the model a tool that does"),
    "safe_prompt": ((False,), "this server adds nothing to prompts"),
}
WITHOUT_EFFECT = frozenset({"mirostat_tau", "mirostat_eta", "guided_decoding_backend"})
"""Fields of other engines that sound like sampling and change no answer of kvern."""
SPEAKS_OF_SAMPLING = re.compile(
    r"penalt|sampl(er|ing)|temperature|mirostat|logit|lora|beam|grammar|schema|regex|ebnf|ngram|seed|logprob|n_probs|"
    r"cutoff|smoothing|guidance|guided|watermark|banned|bias|(^|_)(top|min|typ|xtc|dry|tfs|cfg|eta|epsilon)_|"
    r"(^|_)stop(ping)?(_|$)|^max_(.*_)?tokens?$|_p$"
)
OWN = frozenset({*SamplingParams.__struct_fields__, *STRUCTURED, *RENAMED, "top_logprobs", "stream"})
SPELT = {re.sub("[^a-z]", "", name): name for name in sorted(OWN | CHAT_FIELDS)}
MOST_UNKNOWN = 64
"""The limit of unknown fields in one body: each is compared with all names."""
LONGEST_NAME = 64


def with_own_names(values: Mapping[str, Any], known: Collection[str], place: str = "") -> dict[str, Any]:
    """Returns values in which names of RENAMED are replaced by kvern's. Raises HttpError."""
    found = dict(values)
    for name, ours in RENAMED.items():
        value = found.get(name)
        if value is None or name in known or ours not in known:
            continue
        if found.get(ours) not in (None, value):
            both = f"{place}{name} is {shown(value)} and {place}{ours} {shown(found[ours])}"
            raise HttpError(400, f"{both}: they mean the same; give one of them", param=name)
        found[ours] = -1 if name in ("n_predict", "num_predict") and value == -2 else value
        del found[name]
    if "temperature" in known and not typed(found, "do_sample", bool, True):
        found["temperature"] = 0
    for name, nothing in WINDOWS.items():
        _apply_window(found, name, nothing, place)
    return found


def _apply_window(found: dict[str, Any], name: str, nothing: int | None, place: str) -> None:
    most = typed(found, name, int, -1)
    penalties = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    if most == nothing:
        found.update(penalties)
    elif most > 0 and any(found.get(field) not in (None, usual) for field, usual in penalties.items()):
        message = f"{place}{name} is {most}: penalties look at all of prompt and answer; send -1, or leave it out"
        raise HttpError(400, message, param=name)


def _check_unknown(name: str, value: object, place: str) -> None:
    """Refuses a field that this API does not know if it would change the answer. Raises HttpError."""
    if name in REFUSED:
        check_refused({name: value}, {name: REFUSED[name]}, place)
    elif name in OWN:
        raise HttpError(400, f"{place}{name} is {shown(value)}: this API does not take it there", param=name)
    elif name not in WITHOUT_EFFECT and len(name) <= LONGEST_NAME:
        meant = _meant(name)
        if meant is not None:
            raise HttpError(400, f"{place}{name} is no field: did you mean {meant}?", param=name)
        if value not in (False, 0, "", [], {}) and SPEAKS_OF_SAMPLING.search(name.lower()):
            message = f"{place}{name} is {shown(value)}: this server does not know it, and it may change the answer"
            raise HttpError(400, f"{message}; leave it out", param=name)


def check_extras(body: Mapping[str, Any], known: Collection[str], refused: Refused) -> None:
    """Refuses misspellings, and fields that would change an answer without generated text. Raises HttpError."""
    check_refused(body, refused)
    unknown = [name for name, value in body.items() if value is not None and name not in known and name not in refused]
    if len(unknown) > MOST_UNKNOWN:
        raise HttpError(400, f"the body has {len(unknown)} fields that this API does not know: leave them out")
    for name in unknown:
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.88) if len(name) <= LONGEST_NAME else []
        if near:
            raise HttpError(400, f"{name} is no field: did you mean {near[0]}?", param=name)


@functools.lru_cache(1024)
def _meant(name: str) -> str | None:
    """Returns the field whose misspelling a name is, or None."""
    spelt = re.sub("[^a-z]", "", name.lower())
    near = difflib.get_close_matches(spelt, SPELT, n=1, cutoff=0.88) if len(spelt) >= 4 else []
    return SPELT[near[0]] if near else None


def translated(
    body: Mapping[str, Any], unknown: Sequence[str], known: Collection[str], place: str
) -> Mapping[str, Any]:
    """`other_names.in_own_words`, for a body with `unknown` fields. Raises HttpError."""
    if len(unknown) > MOST_UNKNOWN:
        raise HttpError(400, f"the body has {len(unknown)} fields that this API does not know: leave them out")
    found = with_own_names(body, known, place)
    for name in unknown:
        if not (name in RENAMED and RENAMED[name] in known) and name not in WINDOWS and name != "do_sample":
            _check_unknown(name, body[name], place)
    return found


def without_meaning(names: Iterable[str]) -> list[str]:
    """Returns those of an API's unknown fields that it ignores, if they can be shown."""
    read = {*RENAMED, *WINDOWS, *REFUSED, "do_sample"}
    return sorted(name for name in names if name not in read and name.isascii() and name.isprintable())
