"""What the user asks of the sampler, checked when it is made."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

import msgspec

from kvern.errors import InvalidParameter, half_pair, shown
from kvern.request.structured_output import StructuredOutput

MAX_LOGPROBS = 100
MAX_SAMPLES = 1024
MAX_INTEGER = 2**31 - 1
"""Of token ids, and of numbers of tokens: no vocabulary and no context is larger."""
MAX_WIDE_INTEGER = 2**63 - 1
"""Of a seed and of a priority, which 64 bits hold; the smallest is -2**63."""
LONGEST_SCOPE_END = 512
MIN_SHARE = 1e-37
"""Of top_p and typical_p: float32 has 0 for much less, and nothing would be kept."""
MAX_BEAMS = 64
MAX_LENGTH_PENALTY = 10
"""Powers of a length stay finite."""
MAX_BIAS = 1e9
MAX_FACTOR = 1_000_000
"""Of temperature and repetition_penalty (there also its inverse): products with logits stay finite in float32."""
USUAL: dict[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Parameters of which a model may have own defaults, and what they are where it has none."""


class StopScope(msgspec.Struct, frozen=True, array_like=True):
    """Which part of an answer stop strings are searched in: not in what the model thinks before it."""

    begins: tuple[str, ...]
    """Texts that open thinking if the answer begins with one, or wherever one stands in it if `again`."""
    end: str
    """A regular expression of at most LONGEST_SCOPE_END characters, behind which the visible answer stands."""
    skipped: tuple[str, ...]
    """Texts between `end` and the visible answer that are no part of either."""
    beginning: Literal["possible", "inside", "over"]
    """Where the prompt stands: before thinking that may come, in the middle of it, or behind it."""
    again: bool
    quotable: bool
    """`begins` mean nothing behind a quotation mark or in a block of code."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one request's tokens are chosen. Every field has the meaning it has in vLLM and the OpenAI API.

    Raises InvalidParameter when made with a value out of range.
    """

    temperature: float | None = None
    """0 takes the most probable token. None: the model's generation_config, else 1."""
    top_k: int | None = None
    """Keep the k most probable tokens; 0 keeps all. None: the model's generation_config, else 0."""
    top_p: float | None = None
    """Keep the smallest set of tokens with this probability in all; 0 takes the most probable token. None: the model's
    generation_config, else 1."""
    min_p: float | None = None
    """Keep tokens at least this probable relative to the most probable one. None: the model's generation_config, else
    0."""
    typical_p: float = 1.0
    """Keep the tokens whose surprise is nearest the entropy, with this probability in all (Meister et al. 2022)."""
    top_n_sigma: float = 0.0
    """Keep tokens whose logits are at most this many standard deviations below the best (Tang et al. 2024); 0 or -1
    keeps all."""
    xtc_probability: float = 0.0
    """How often the most probable tokens are dropped, all that reach `xtc_threshold` but the last of them (XTC)."""
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    """The temperature is so much lower where the model is sure, and higher where it is not; 0: it stays."""
    dynatemp_exponent: float = 1.0
    """The power of the normalised entropy that says how sure the model is."""
    repetition_penalty: float | None = None
    """Divide (positive) or multiply (negative) the logits of tokens in prompt or output (Keskar et al. 2019). None: the
    model's generation_config, else 1."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that the token is in the output."""
    dry_multiplier: float = 0.0
    """Subtracted, times `dry_base ** (length - dry_allowed_length)`, from the logits of tokens that would go on with a
    repetition of this length (DRY). 0: nothing is."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    """Tokens of the shortest repetition that counts."""
    dry_penalty_last_n: int = -1
    """Look for repetitions in so many of the last tokens of prompt and output; -1: in all, 0: in none."""
    dry_sequence_breakers: list[str] | None = None
    """Texts that repetitions do not reach over. None: line break, colon, quotation mark and asterisk."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids."""
    allowed_token_ids: list[int] | None = None
    """Only these token ids can be sampled."""
    bad_words: list[str] | None = None
    """Texts whose token sequences are never completed."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many output tokens."""
    max_tokens: int | None = None
    """Tokens to generate at most. None or -1: until the context is full."""
    stop: list[str] | str | None = None
    """Generation ends when the text contains one of these; in a chat: the answer, not what is thought before it."""
    stop_scope: StopScope | None = None
    """Where `stop` is searched, as a chat says of its model; None: in the whole text."""
    stop_token_ids: list[int] | None = None
    """Generation ends at one of these tokens."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    """The same seed gives the same tokens, alone and in any batch. None or -1: another one each time."""
    n: int = 1
    """Independent answers to one prompt, which share its KV blocks; with `beam_width` the best of the beams."""
    beam_width: int | None = None
    """Search with so many beams instead of sampling: the answers are the `n` most probable that it finds."""
    length_penalty: float = 1.0
    """Beams that have ended are ordered by their log-probability over their length to this power."""
    early_stopping: bool | str = False
    """true: end when `beam_width` answers are found; never: when no beam can become better than them; false: when the
    best beam is not better as it stands."""
    logprobs: int | None = None
    """Log-probabilities of the sampled token and of this many most probable ones, from the model's own logits."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    prompt_logprobs_from: int = 1
    """Position of the first prompt token that gets them; what is before can come from the prefix cache."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    visible_token_ids: list[int] | None = None
    """Special tokens that stay in the text all the same."""
    structured: StructuredOutput | None = None
    """What the answer must look like: a JSON schema, a regular expression, a choice or a grammar."""

    logits_processors: dict[str, dict[str, Any]] | None = None
    """By name, arguments of the custom logits processors that the engine was started with."""

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def penalizes_repetitions(self) -> bool:
        """DRY is asked for."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def penalizes_tokens(self) -> bool:
        """Tokens that the text has are made less probable, or more."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def sequences(self) -> int:
        """Sequences that run side by side for one prompt."""
        return self.beam_width or self.n

    def replace(self, **changes: Any) -> Self:
        """A copy with other values, checked again."""
        return msgspec.structs.replace(self, **changes)

    def resolved(self, defaults: Mapping[str, float] = USUAL) -> "ResolvedParams":
        """A copy in which a model's defaults, by the names of `USUAL`, stand for what is None.

        A beam search draws nothing and takes none of them.
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
        for name, kept in MEANINGLESS_WITH_BEAMS.items():
            if getattr(self, name) not in kept:
                raise InvalidParameter(
                    f"{name} is {getattr(self, name)} with beam_width {self.beam_width}: beams are not drawn; leave "
                    f"{name} out"
                )


class ResolvedParams(SamplingParams, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters in which no default of a model is open: what everything behind `InputProcessor` reads."""

    temperature: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


MEANINGLESS_WITH_BEAMS: dict[str, tuple[float | None, ...]] = {
    "temperature": (None, 0),
    "top_k": (None, 0, -1),
    "top_p": (None, 1),
    "min_p": (None, 0),
    "typical_p": (1,),
    "top_n_sigma": (0, -1),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
}
"""Fields that say how tokens are drawn, and the values of each that ask for nothing."""


LISTS_OF_TEXTS = ("bad_words", "dry_sequence_breakers")
LISTS_OF_TOKENS = ("allowed_token_ids", "stop_token_ids", "visible_token_ids")


def check_wide_integer(name: str, value: float | None) -> None:
    """Refuse what is no whole number of 64 bits. Raises InvalidParameter."""
    _check_integer(name, value, -MAX_WIDE_INTEGER - 1, MAX_WIDE_INTEGER)


def _check_travels(name: str, value: object) -> None:
    """Refuse what cannot travel to the engine."""
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
