"""DRY beside its definition, in float64 and one token after the other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvern import LLM, SamplingParams
from kvern.engine.breakers import BreakerFinder
from kvern.errors import InvalidParameter, InvalidRequest
from kvern.request.request import Breakers
from kvern.sample import dry
from kvern.sample.constraints import constrain
from kvern.text.tokenizer import Tokenizer
from tests.support import tiny_tokenizer
from tests.support.sampler_inputs import VOCABULARY, make_rows, random_logits
from tests.support.sampling import examples

WIDE = SamplingParams(dry_multiplier=0.8)
NOTHING: tuple[frozenset[int], tuple[tuple[int, ...], ...]] = (frozenset(), ())


def packed(tokens: frozenset[int], sequences: Sequence[tuple[int, ...]]) -> Breakers:
    bits = sum(1 << token for token in tokens)
    return Breakers(bits.to_bytes((VOCABULARY + 7) // 8, "little"), tuple(sequences))


def expected_penalties(
    tokens: list[int], params: SamplingParams, breaking: tuple[frozenset[int], Sequence[tuple[int, ...]]] = NOTHING
) -> torch.Tensor:
    """By the definition: what each token of the vocabulary loses, [vocabulary] float64."""
    window = tokens[-params.dry_penalty_last_n :] if params.dry_penalty_last_n > 0 else tokens
    alone, sequences = breaking

    def breaks(end: int) -> bool:
        together = any(tuple(window[max(end - len(item), 0) : end]) == item for item in sequences)
        return window[end - 1] in alone or together

    most = next((behind for behind in range(len(window)) if breaks(len(window) - behind)), len(window))
    longest: dict[int, int] = {}
    for place in range(len(window) - 1):
        length = 0
        while length < min(most, place + 1) and window[place - length] == window[-1 - length]:
            length += 1
        longest[window[place + 1]] = max(longest.get(window[place + 1], 0), length)
    result = torch.zeros(VOCABULARY, dtype=torch.float64)
    for token, length in longest.items():
        if length >= params.dry_allowed_length:
            result[token] = params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
    return result.clamp(max=dry.MOST_PENALTY)


def penalties(
    requests: Sequence[tuple[SamplingParams, list[int]]],
    breaking: tuple[frozenset[int], Sequence[tuple[int, ...]]] = NOTHING,
    positions: Sequence[int] | None = None,
) -> torch.Tensor:
    """What repetitions take from logits of 0, [N, vocabulary]; with positions these are on the device alone."""
    rows = make_rows(*((params, tokens, 1) for params, tokens in requests), breakers=packed(*breaking))
    logits = torch.zeros(len(requests), VOCABULARY)
    exact = None if positions is None else torch.tensor(positions)
    repeating = [row for row, (params, _) in enumerate(requests) if params.penalizes_repetitions]
    lengths = [len(tokens) for _, tokens in requests]
    dry.penalize_repetitions(logits, rows, repeating, range(len(requests)), lengths, exact)
    return -logits.double()


def test_the_longer_a_repetition_the_more_its_next_token_loses() -> None:
    tokens = [1, 2, 3, 4, 9, 3, 5, 9, 1, 2, 3]  # "1 2 3" was followed by 4, and "3" by 5
    found = penalties([(WIDE.replace(dry_allowed_length=1), tokens)])[0]
    assert found.nonzero()[:, 0].tolist() == [4, 5]
    assert found[4] == pytest.approx(0.8 * 1.75**2) and found[5] == pytest.approx(0.8)
    assert penalties([(WIDE.replace(dry_allowed_length=4), tokens)]).count_nonzero() == 0


def test_a_breaker_hides_what_stands_before_it() -> None:
    tokens = [1, 2, 3, 4, 9, 9, 1, 2, 3]
    for breaking, length in (((frozenset({7}), ()), 3), ((frozenset({2}), ()), 1), ((frozenset(), ((1, 2),)), 1)):
        assert penalties([(WIDE.replace(dry_allowed_length=1), tokens)], breaking)[0, 4] == pytest.approx(
            0.8 * 1.75 ** (length - 1)
        )
    assert penalties([(WIDE, tokens)], (frozenset({3}), ())).count_nonzero() == 0


def test_a_token_loses_a_finite_amount() -> None:
    found = penalties([(WIDE.replace(dry_base=1e6, dry_multiplier=1e6), [5] * 3000), (WIDE, [6])])
    assert found[0, 5] == dry.MOST_PENALTY and found.isfinite().all() and not found[1].any()


TEXTS = st.integers(2, 4).flatmap(lambda letters: st.lists(st.integers(0, letters), min_size=1, max_size=40))
PARAMS = st.builds(
    SamplingParams,
    dry_multiplier=st.floats(0.1, 3),
    dry_base=st.floats(1, 2),
    dry_allowed_length=st.integers(1, 4),
    dry_penalty_last_n=st.sampled_from((-1, -1, 1, 2, 9, 20, 100)),
)
BREAKING = st.tuples(
    st.frozensets(st.integers(2, 5), max_size=1),
    st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=3).map(tuple), max_size=1),
)


@settings(max_examples=examples(150), deadline=None)
@given(requests=st.lists(st.tuples(PARAMS, TEXTS), min_size=1, max_size=5), breaking=BREAKING, data=st.data())
def test_it_is_what_the_definition_says(
    requests: list[tuple[SamplingParams, list[int]]], breaking: Any, data: st.DataObject
) -> None:
    """In any company, in parts of any size, and where only the device knows how many tokens there are."""
    expected = torch.stack([expected_penalties(tokens, params, breaking) for params, tokens in requests])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dry, "MOST_PLACES", data.draw(st.sampled_from((1, 60, 1 << 20))))
        assert torch.allclose(penalties(requests, breaking), expected, rtol=1e-5)
        known = [data.draw(st.integers(1, len(tokens))) for _, tokens in requests]
        expected = torch.stack(
            [
                expected_penalties(tokens[:count], params, breaking)
                for (params, tokens), count in zip(requests, known, strict=True)
            ]
        )
        assert torch.allclose(penalties(requests, breaking, known), expected, rtol=1e-5)


def test_rows_without_it_keep_their_logits() -> None:
    tokens = [1, 2, 3, 1, 2]
    off = [SamplingParams(), WIDE.replace(dry_penalty_last_n=0), WIDE.replace(dry_multiplier=0)]
    found = penalties([(params, tokens) for params in (*off, WIDE)])
    assert not found[:3].any() and found[3, 3] == pytest.approx(0.8)


def test_penalties_come_before_it_and_what_is_banned_stays_banned() -> None:
    tokens = [1, 2, 3, 1, 2]
    params = WIDE.replace(repetition_penalty=1.5, allowed_token_ids=[3, 4], logit_bias={3: 1.0})
    plain = params.replace(dry_multiplier=0)
    with_it, without = random_logits(3), random_logits(3)
    constrain(with_it, make_rows((params, tokens, 1)), [0], [5])
    constrain(without, make_rows((plain, tokens, 1)), [0], [5])
    change = torch.where(torch.arange(VOCABULARY) == 3, 0.8, 0.0)
    assert torch.allclose(with_it, without - change) and with_it.isneginf().sum() == VOCABULARY - 2


# Breakers


def broken(breakers: Breakers, vocab_size: int) -> set[int]:
    bits = int.from_bytes(breakers.tokens, "little")
    return {token for token in range(vocab_size) if bits >> token & 1}


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_every_token_in_which_a_breaker_is_breaks(kind: str, tmp_path: Path) -> None:
    backend = getattr(tiny_tokenizer, kind)()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    size = tokenizer.vocab_size + 7  # a table is padded
    find = BreakerFinder(tokenizer, size)
    for text in ("e", "ello", "|>", ":", "\n"):
        expected = {token for token in range(size) if text.encode() in tokenizer.id_to_bytes(token)}
        assert broken(find([text]), size) == expected
        assert expected or not text.isalpha()
    assert find(["e", "o"]) is find(["o", "e", "o"]), "remembered"
    assert broken(find(None), size) == broken(find(["*", '"', ":", "\n"]), size)
    assert find([]) == Breakers(bytes((size + 7) // 8), ())
    assert find(["x yz"]).sequences == tuple(
        dict.fromkeys(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("x yz", " x yz"))
    )
    with pytest.raises(InvalidRequest, match="half of a surrogate pair, which is no character"):
        find(["\ud800"])


def test_a_model_without_a_tokenizer_has_no_usual_breakers(tmp_path: Path) -> None:
    find = BreakerFinder(Tokenizer(tmp_path), 20)
    assert find(None) == Breakers(bytes(3), ())
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
        find(["a"])


def test_an_answer_that_repeats_itself_ceases_to(tiny_llm: LLM) -> None:
    """Greedy, of ten tokens: without it the answer is a loop; with it, no five tokens come twice."""
    prompt = [7, 8, 9, 10] * 8
    plain = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, allowed_token_ids=list(range(20, 30)))

    def repeated(params: SamplingParams) -> int:
        tokens = tiny_llm.generate(prompt, params)[0].outputs[0].token_ids
        runs = [tuple(tokens[place : place + 5]) for place in range(len(tokens) - 4)]
        return len(runs) - len(set(runs))

    assert repeated(plain) > 20
    strict = plain.replace(dry_multiplier=1e6, dry_sequence_breakers=[])
    assert repeated(strict) == 0
    with pytest.raises(InvalidParameter, match=r"dry_base is 0\.5: it must be a finite number at least 1"):
        strict.replace(dry_base=0.5)


class Elements(TorchDispatchMode):
    """Counts those of all results."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += result.numel() if isinstance(result, torch.Tensor) else 0
        return result


def test_many_long_breakers_cost_little() -> None:
    tokens, length = [index % 7 for index in range(2000)], 39
    many = [tuple((index * (place + 1)) % 7 for place in range(length - index % 9)) for index in range(1, 65)]
    counts = []
    for sequences in ([], many):
        penalties([(WIDE, tokens)], (frozenset(), sequences))
        with Elements() as elements:
            penalties([(WIDE, tokens)], (frozenset(), sequences))
        counts.append(elements.count)
    assert counts[1] < 4 * counts[0]
