"""Sampling parameters of a request, checked when they are created."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NoReturn, Self

import msgspec

from kvern.errors import InvalidParameter, half_pair, shown
from kvern.plugins import imported
from kvern.request.other_names import fields_of, structured_fields

OWN_PARAMETERS = "kvern.request.python_names:own_parameters"
KINDS = ("json", "regex", "choice", "grammar")
MOST_CHOICES = 10_000


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of four forms. Raises InvalidParameter if none or several are given."""

    json: dict[str, Any] | bool | None = None
    """JSON that this schema describes (draft 2020-12); True: any JSON object."""
    regex: str | None = None
    """Text that this regular expression matches as a whole."""
    choice: list[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """Text that this grammar derives, in Lark's notation (or GBNF, which has `::=`)."""
    parts: "dict[str, StructuredOutput] | None" = None
    """Further forms, which a grammar in Lark's notation refers to as `@NAME`."""

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            names = ", ".join(KINDS)
            raise InvalidParameter(f"structured has {', '.join(given) or 'nothing'}: give exactly one of {names}")
        if self.json is False:
            raise InvalidParameter("structured: the schema false allows no value at all")
        if self.choice is not None and not 0 < len(self.choice) <= MOST_CHOICES:
            raise InvalidParameter(f"structured: choice has {len(self.choice)} texts: give 1 to {MOST_CHOICES}")
        if "" in (self.choice or ()):
            raise InvalidParameter("structured: choice holds an empty text: leave it out")
        if self.parts is not None and (self.grammar is None or any(part.parts for part in self.parts.values())):
            raise InvalidParameter("structured: only a grammar has parts, and they have none themselves")


def structured_output(fields: Mapping[str, Any]) -> StructuredOutput:
    """Returns the form with these fields, those of vLLM's `structured_outputs` too. Raises InvalidParameter."""
    try:
        return msgspec.convert(structured_fields(fields), StructuredOutput)
    except msgspec.ValidationError as error:
        raise InvalidParameter(f"structured: {error}") from error


MAX_LOGPROBS = 100
MAX_SAMPLES = 1024
MAX_INTEGER = 2**31 - 1
"""The limit of token ids and of numbers of tokens: no vocabulary or context is larger."""
MAX_WIDE_INTEGER = 2**63 - 1
"""The limit of a seed and of a priority in 64 bits; the least is -2**63."""
LONGEST_SCOPE_END = 512
MIN_SHARE = 1e-37
"""The least top_p and typical_p: smaller values are 0 in float32, and would keep no token."""
MAX_BEAMS = 64
MAX_LENGTH_PENALTY = 10
"""The limit with which powers of a length stay finite."""
MAX_BIAS = 1e9
MAX_FACTOR = 1_000_000
"""The limit of temperature and repetition_penalty (and its inverse): products with logits stay finite in float32."""
GREEDY_BELOW = 1e-5
"""Temperatures below this select the most probable token, because a division by them would overflow."""
USUAL: dict[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Parameters for which a model may have defaults, with their values if it has none."""


class StopScope(msgspec.Struct, frozen=True, array_like=True):
    """The part of an answer in which stop strings are searched: not in the reasoning before it."""

    begins: tuple[str, ...]
    """Texts that start reasoning at the beginning of an answer, or anywhere in it if `again`."""
    end: str
    """A regular expression of at most LONGEST_SCOPE_END characters, after which the visible answer begins."""
    skipped: tuple[str, ...]
    """Texts between `end` and the visible answer that belong to neither."""
    beginning: Literal["possible", "inside", "over"]
    """The state at the end of the prompt: before possible reasoning, in it, or after it."""
    again: bool
    quotable: bool
    """`begins` have no effect after a quotation mark or in a block of code."""


class _OtherNames(msgspec.StructMeta):
    """Lets SamplingParams take the names of other engines."""

    def __call__(cls, *args: Any, **values: Any) -> Any:  # noqa: N805
        try:
            return super().__call__(*args, **values)
        except TypeError:
            known = cls.__struct_fields__
            if all(name in known for name in values):
                raise
        return super().__call__(*args, **imported(OWN_PARAMETERS)(values, known))


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_OtherNames):
    """Sampling parameters of one request, with the meaning that they have in vLLM and in the OpenAI API.

    Names that they have in other engines, such as `max_new_tokens`, are accepted (`request/other_names.py`).
    Raises InvalidParameter if a value is out of range.
    """

    temperature: float | None = None
    """Sampling temperature; 0 takes the most probable token. None: the model's generation_config, else 1."""
    top_k: int | None = None
    """Keep the k most probable tokens; 0 keeps all. None: the model's generation_config, else 0."""
    top_p: float | None = None
    """Keep the smallest set of tokens with this total probability; 0 takes the most probable token. None: the model's
    generation_config, else 1."""
    min_p: float | None = None
    """Keep tokens at least this probable relative to the most probable one. None: the model's generation_config, else
    0."""
    typical_p: float = 1.0
    """Keep the tokens whose surprise is nearest to the entropy, with this total probability (Meister et al. 2022)."""
    top_n_sigma: float = 0.0
    """Keep tokens whose logits are at most this many standard deviations below the best (Tang et al. 2024); 0 or -1
    keeps all."""
    xtc_probability: float = 0.0
    """Probability with which all tokens that reach `xtc_threshold` but the least probable of them are dropped (XTC)."""
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    """Range of the temperature around its value: lower if the model is certain, higher if not; 0 keeps it fixed."""
    dynatemp_exponent: float = 1.0
    """Exponent of the normalized entropy that measures the model's certainty."""
    repetition_penalty: float | None = None
    """Divide (positive) or multiply (negative) the logits of tokens in prompt or output (Keskar et al. 2019). None: the
    model's generation_config, else 1."""
    presence_penalty: float = 0.0
    """Subtract this from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtract this from the logits of tokens once for each occurrence in the output."""
    dry_multiplier: float = 0.0
    """Subtract this times `dry_base ** (length - dry_allowed_length)` from the logits of tokens that would continue a
    repetition of this length (DRY). 0 disables it."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    """Tokens of the shortest repetition that counts."""
    dry_penalty_last_n: int = -1
    """Search for repetitions in this many of the last tokens of prompt and output; -1: in all, 0: in none."""
    dry_sequence_breakers: list[str] | None = None
    """Texts that end a repetition. None: line break, colon, quotation mark and asterisk."""
    logit_bias: dict[int, float] | None = None
    """Values that are added to the logits of these token ids."""
    allowed_token_ids: list[int] | None = None
    """Token ids that can be sampled; no others."""
    bad_words: list[str] | None = None
    """Texts whose token sequences are never completed."""
    min_tokens: int = 0
    """Output tokens before which no end-of-sequence or stop token is sampled."""
    max_tokens: int | None = None
    """Most tokens to generate. None or -1: until the context is full."""
    stop: list[str] | str | None = None
    """Texts at which generation ends; in a chat they are searched in the answer, not in its reasoning."""
    stop_scope: StopScope | None = None
    """Part of the text in which `stop` is searched, set by chats; None: the whole text."""
    stop_token_ids: list[int] | None = None
    """Tokens at which generation ends."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    """Seed of the sampling; the same seed gives the same tokens, alone and in any batch. None or -1: a random one."""
    n: int = 1
    """Independent answers to one prompt, which share its KV blocks; with `beam_width` the best of the beams."""
    beam_width: int | None = None
    """Number of beams of a beam search, whose `n` most probable results are the answers."""
    length_penalty: float = 1.0
    """Exponent of the length by which the log-probability of ended beams is divided for their order."""
    early_stopping: bool | str = False
    """true: end when `beam_width` answers are found; never: when no beam can become better than them; false: when the
    best beam is not better in its present state."""
    logprobs: int | None = None
    """Return log-probabilities of the sampled token and of this many most probable ones, from the model's logits."""
    prompt_logprobs: int | None = None
    """Return log-probabilities of each prompt token but the first, and of this many most probable ones."""
    prompt_logprobs_from: int = 1
    """Position of the first prompt token that gets them; tokens before it can come from the prefix cache."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    visible_token_ids: list[int] | None = None
    """Special tokens that nevertheless stay in the text."""
    structured: StructuredOutput | None = None
    """Form of the answer: a JSON schema, a regular expression, a choice or a grammar."""

    logits_processors: dict[str, dict[str, Any]] | None = None
    """Arguments of the engine's custom logits processors, by their names."""

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def penalizes_repetitions(self) -> bool:
        """True if DRY is active."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def penalizes_tokens(self) -> bool:
        """True if tokens in the text get another probability."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_rare_filters(self) -> bool:
        """True if a filter of `sample/rare_filters.py` is used."""
        return self.top_n_sigma > 0 or self.xtc_probability > 0 or self.dynatemp_range > 0

    @property
    def sequences(self) -> int:
        """The sequences that run in parallel for one prompt."""
        return self.beam_width or self.n

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with other values, checked again."""
        return msgspec.structs.replace(self, **changes)

    def resolved(self, defaults: Mapping[str, float] = USUAL) -> "ResolvedParams":
        """Returns a copy in which a model's defaults, by the names of `USUAL`, replace None.

        A beam search does not sample and uses none of them.
        """
        if self.beam_width is not None:
            defaults = {"temperature": 0.0}
        values = msgspec.structs.asdict(self)
        for name, usual in USUAL.items():
            values[name] = defaults.get(name, usual) if values[name] is None else values[name]
        values["top_k"] = max(values["top_k"], 0)
        if values["top_p"] < MIN_SHARE:
            values |= {"temperature": 0.0, "top_p": 1.0}
        return ResolvedParams(**values)

    def __post_init__(self) -> None:
        for name in ("max_tokens", "seed"):
            if getattr(self, name) == -1:
                msgspec.structs.force_setattr(self, name, None)
        _check_range("temperature", self.temperature, 0, MAX_FACTOR)
        _check_integer("top_k", self.top_k, -1, MAX_INTEGER)
        _check_range("top_p", self.top_p, 0, 1)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("typical_p", self.typical_p, MIN_SHARE, 1)
        _check_range("repetition_penalty", self.repetition_penalty, 1 / MAX_FACTOR, MAX_FACTOR)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_range("top_n_sigma", self.top_n_sigma, -1, MAX_FACTOR)
        _check_range("xtc_probability", self.xtc_probability, 0, 1)
        _check_range("xtc_threshold", self.xtc_threshold, 0, 1)
        _check_range("dynatemp_range", self.dynatemp_range, 0, MAX_FACTOR)
        _check_range("dynatemp_exponent", self.dynatemp_exponent, 0, MAX_FACTOR)
        self._check_dry()
        _check_integer("min_tokens", self.min_tokens, 0, MAX_INTEGER)
        _check_integer("max_tokens", self.max_tokens, 1, MAX_INTEGER)
        check_wide_integer("seed", self.seed)
        _check_integer("n", self.n, 1, MAX_SAMPLES)
        self._check_beams()
        _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_integer("prompt_logprobs_from", self.prompt_logprobs_from, 1, MAX_INTEGER)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}: lower it or raise max_tokens"
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParameter("allowed_token_ids is empty and bans everything: name a token or leave it out")
        form: object = self.structured
        if not isinstance(form, StructuredOutput):
            form = fields_of(form)
        if isinstance(form, Mapping):
            msgspec.structs.force_setattr(self, "structured", structured_output(form))
        if self.structured is not None and self.ignore_eos:
            raise InvalidParameter("ignore_eos is true with structured, whose answers end by that: leave one out")
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise InvalidParameter(f"structured is {shown(self.structured)}: it must be a StructuredOutput")
        if self.stop_scope is not None and not isinstance(self.stop_scope, StopScope):
            raise InvalidParameter(f"stop_scope is {shown(self.stop_scope)}: chats set it; leave it out")
        for name, values in _items("logits_processors", self.logits_processors):
            if not isinstance(values, dict):
                raise InvalidParameter(
                    f"logits_processors: {name:.60} is {shown(values)}: it must be an object of arguments"
                )
        for name in ("structured", "logits_processors"):
            _check_travels(name, getattr(self, name))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(f"{name} is {shown(getattr(self, name))}: it must be true or false")
        self._check_lists()

    def _check_dry(self) -> None:
        _check_range("dry_multiplier", self.dry_multiplier, 0, MAX_FACTOR)
        _check_range("dry_base", self.dry_base, 1, MAX_FACTOR)
        _check_integer("dry_allowed_length", self.dry_allowed_length, 1, MAX_INTEGER)
        _check_integer("dry_penalty_last_n", self.dry_penalty_last_n, -1, MAX_INTEGER)

    def _check_lists(self) -> None:
        _check_list("stop", [] if isinstance(self.stop, str) else self.stop)
        for name in (*LISTS_OF_TEXTS, *LISTS_OF_TOKENS):
            _check_list(name, getattr(self, name))
        biases = _items("logit_bias", self.logit_bias)
        for name in (*LISTS_OF_TOKENS, "logit_bias"):
            for token in getattr(self, name) or ():
                if type(token) is not int or not 0 <= token <= MAX_INTEGER:
                    _check_integer(f"a token id of {name}", token, 0, MAX_INTEGER)
        for name, words in (
            ("stop", self.stop_strings),
            *((name, getattr(self, name) or ()) for name in LISTS_OF_TEXTS),
        ):
            for word in words:
                if not isinstance(word, str) or not word:
                    raise InvalidParameter(
                        f"{name} holds {shown(word)}: its entries must be texts of one character or more"
                    )
                _check_travels(name, word)
        for token, bias in biases:
            _check_range(f"logit_bias of token {token}", bias, -MAX_BIAS, MAX_BIAS)

    def _check_beams(self) -> None:
        _check_integer("beam_width", self.beam_width, 1, MAX_BEAMS)
        _check_range("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidParameter(f"early_stopping is {shown(self.early_stopping)}: it must be true, false or 'never'")
        if self.beam_width is None:
            for name, nothing in {"length_penalty": 1, "early_stopping": False}.items():
                if getattr(self, name) != nothing:
                    raise InvalidParameter(
                        f"{name} is {shown(getattr(self, name))} without beam_width: it orders beams; give beam_width "
                        "or leave it out"
                    )
            return
        if self.n > self.beam_width:
            raise InvalidParameter(
                f"n is {self.n}, above beam_width {self.beam_width}: a search has as many answers as beams; lower n or "
                "raise beam_width"
            )
        for name, kept in REFUSED_WITH_BEAMS.items():
            if getattr(self, name) not in kept:
                raise InvalidParameter(
                    f"{name} is {getattr(self, name)} with beam_width {self.beam_width}: beams are not drawn; leave "
                    f"{name} out"
                )


def _refuse_change(params: SamplingParams, name: str, value: object) -> NoReturn:
    raise AttributeError(f"sampling parameters do not change: replace({name}=...) returns others")


setattr(SamplingParams, "__setattr__", _refuse_change)  # noqa: B010 (msgspec takes none in the body of a frozen class)


class ResolvedParams(SamplingParams, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters without open defaults, as they are after `InputProcessor`."""

    temperature: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def is_greedy(self) -> bool:
        """True if the most probable token is chosen."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_common_filters(self) -> bool:
        """True if a common filter excludes tokens; `has_rare_filters` answers for the others."""
        return bool(self.top_k) or self.top_p < 1.0 or bool(self.min_p) or self.typical_p < 1.0


REFUSED_WITH_BEAMS: dict[str, tuple[float | None, ...]] = {
    "temperature": (None, 0),
    "top_k": (None, 0, -1),
    "top_p": (None, 1),
    "min_p": (None, 0),
    "typical_p": (1,),
    "top_n_sigma": (0, -1),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
}
"""The fields that filter or scale probabilities, with the values that change nothing: beams refuse all others."""


LISTS_OF_TEXTS = ("bad_words", "dry_sequence_breakers")
LISTS_OF_TOKENS = ("allowed_token_ids", "stop_token_ids", "visible_token_ids")


def check_wide_integer(name: str, value: float | None) -> None:
    """Refuses values that are no 64-bit integers. Raises InvalidParameter."""
    _check_integer(name, value, -MAX_WIDE_INTEGER - 1, MAX_WIDE_INTEGER)


def _check_travels(name: str, value: object) -> None:
    """Refuses values that cannot be sent to the engine. Raises InvalidParameter."""
    if value is not None:
        try:
            msgspec.msgpack.encode(value)
        except OverflowError as error:
            raise InvalidParameter(f"{name} holds a whole number of more than 64 bits: make it smaller") from error
        except UnicodeEncodeError as error:
            raise InvalidParameter(f"{name} holds {half_pair(error)}") from error


def _items(name: str, value: object) -> Iterable[tuple[Any, Any]]:
    if value is not None and not isinstance(value, dict):
        raise InvalidParameter(f"{name} is {shown(value)}: it must be an object")
    return (value or {}).items()


def _check_list(name: str, value: object) -> None:
    if value is not None and not isinstance(value, (list, tuple)):
        raise InvalidParameter(f"{name} is {shown(value)}: it must be a list")


def _check_integer(name: str, value: float | None, low: int, high: int) -> None:
    _check_range(name, value, low, high)
    if value is not None and not isinstance(value, int):
        raise InvalidParameter(f"{name} is {value}: it must be a whole number")


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidParameter(f"{name} is {shown(value)}: it must be a number")
    if not low <= value <= high:
        raise InvalidParameter(
            f"{name} is {shown(value)}: it must be a finite number at least {low} and at most {high}"
        )


def params_of(values: Mapping[str, Any]) -> SamplingParams:
    """Returns the parameters that a mapping names. Raises InvalidParameter for a wrong name or value."""
    try:
        return msgspec.convert(imported(OWN_PARAMETERS)(values, SamplingParams.__struct_fields__), SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidParameter(f"{error}") from error
