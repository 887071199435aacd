"""Stop strings: found where trying them all would find them, for little work, however many and long they are."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvern import LLM, SamplingParams
from kvern.api.fields import LONGEST_LISTS, LONGEST_STOP, check_bounds
from kvern.engine.output import OutputProcessor
from kvern.engine.stop_strings import StopSearch, StopStrings, search_of
from kvern.request.events import TokenEvent
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from kvern.text.tokenizer import Tokenizer
from kvern.tools.thinking import HARMONY, THINKING
from kvern.tools.thinking_splitter import Beginning, Thought
from tests.support.sampling import examples

MOST, LONGEST = LONGEST_LISTS["stop"], LONGEST_STOP
MOST_LINES = 100
"""Of Python that a token's text may cost, on the average of an answer."""

MODULES = ("output.py", "stop_strings.py", "beams.py")

HARD_LISTS = {
    "one long beginning": ["e" * (LONGEST - 2) + chr(200 + index) * 2 for index in range(MOST)],
    "many lengths": ["e" * (LONGEST - 1 - index) + "X" for index in range(MOST)],
    "beginnings within": ["ea" * index + "e" * (LONGEST - 2 * index - 1) + "X" for index in range(MOST)],
    "nothing in common": [chr(200 + index) + "e" * (LONGEST - 2) + "X" for index in range(MOST)],
}


class Lines:
    """How many lines of output processing ran."""

    count = 0


@contextmanager
def counted() -> Iterator[Lines]:
    """Count the lines that run in the modules that find stop strings."""
    lines = Lines()

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        lines.count += event == "line"
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        return line if Path(frame.f_code.co_filename).name in MODULES else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield lines
    finally:
        sys.settrace(before)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        pytest.param(stop, text, id=f"{name}-{place}", marks=[pytest.mark.nightly] if (number + place) % 4 else [])
        for number, (name, stop) in enumerate(HARD_LISTS.items())
        for place, text in enumerate(["e" * 3000, ("e" * 1023 + "b") * 3, "ea" * 1500, "the fox jumps " * 100])
    ],
)
def test_the_largest_lists_cost_little(tiny_model: Path, stop: list[str], text: str) -> None:
    tokenizer = Tokenizer(tiny_model)
    params = ResolvedParams(stop=stop, n=2)
    check_bounds(SamplingParams(stop=stop, n=2), 1)
    with counted() as lines:
        spec = RequestSpec("r", PromptInput([5]), params, 9999)
        processor = OutputProcessor(tokenizer)
        output = processor.add(None, spec)
        tokens = tokenizer.encode(text)
        for token in tokens:
            processor.process([TokenEvent(name, [token]) for name in spec.answer_ids])
    assert lines.count < MOST_LINES * 2 * len(tokens)
    for answer in output.outputs:
        assert answer.token_ids == tokens and text.startswith(answer.text) and len(answer.text) > len(text) - LONGEST


def test_others_are_served_beside_the_largest_lists(tiny_llm: LLM) -> None:
    """A request whose answer begins like all of its stop strings, and one without any, in one batch."""
    (letter,) = tiny_llm.tokenizer.encode("e")
    plain = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    hard = plain.replace(allowed_token_ids=[letter], stop=HARD_LISTS["many lengths"], n=8)
    check_bounds(hard, 1)
    alone = tiny_llm.generate("the quick fox", plain)[0].outputs
    with counted() as lines:
        attack, other = tiny_llm.generate([[letter], "the quick fox"], [hard, plain])
    assert other.outputs == alone
    assert [answer.text for answer in attack.outputs] == ["e" * 60] * 8
    assert lines.count < MOST_LINES * 9 * 60


@pytest.mark.sample(1)
@pytest.mark.parametrize("stop", HARD_LISTS.values(), ids=HARD_LISTS)
def test_beams_look_for_the_largest_lists_at_little_cost(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch, stop: list[str]
) -> None:
    """What a beam's next token costs is neither its answer's length nor the list's: tokens decoded, and lines run."""
    letter, other = (tiny_llm.tokenizer.encode(text)[0] for text in "eo")
    width, length = 4, 60
    params = SamplingParams(beam_width=width, n=width, max_tokens=length, allowed_token_ids=[letter, other], stop=stop)
    decode, decoded = Tokenizer.decode, 0

    def counting(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(tokenizer, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    check_bounds(params, 1)
    with counted() as lines:
        (output,) = tiny_llm.generate([[letter]], params)
    assert [len(answer.token_ids) for answer in output.outputs] == [length] * width
    candidates = 2 * width * length
    assert decoded <= 8 * candidates
    assert lines.count < MOST_LINES * candidates


LETTERS = "ab"
STOP_LISTS = st.lists(st.text(alphabet=LETTERS, min_size=1, max_size=6), max_size=6)


@settings(max_examples=examples(500))
@given(pieces=st.lists(st.text(alphabet=LETTERS + "c", max_size=6), max_size=12), stop=STOP_LISTS)
@example(pieces=["ab", "", "ca"], stop=["abc", "b", "bca"])
def test_found_as_by_trying_all(pieces: list[str], stop: list[str]) -> None:
    """Pieces of several characters at once, and stop strings that overlap, contain and begin like each other."""
    stop_strings = StopStrings(stop)
    searches = [StopSearch(stop_strings), StopSearch(stop_strings)]
    text = ""
    for piece in pieces:
        before, text = text, text + piece
        places = [
            (place, order, word)
            for order, word in enumerate(stop)
            for place in range(len(text))
            if text.startswith(word, place) and place + len(word) > len(before)
        ]
        expected = (min(places)[0], min(places)[2]) if places else None
        sizes = range(min(len(text), max(map(len, stop), default=1) - 1) + 1)
        held = max(size for size in sizes if not size or any(word.startswith(text[-size:]) for word in stop))
        for search in searches:  # the second finds all states made
            assert (search.append(piece), search.held_back) == (expected, held)


THINK, WRAPPED, SPOKEN = ({form.name: form for form in THINKING}[name] for name in ("think", "kimi_k3", "apriel"))
HEADER = "<|start|>assistant<|channel|>"
ANALYSIS = HEADER + "analysis<|message|>as<|end|>"
SCOPED: list[tuple[Any, Beginning, str, str, str | None]] = [
    (THINK, "inside", "a\n\nb</think>", "\n\n", None),
    (THINK, "inside", "a\n\nb</think>\n\nc|\n\nd", "\n\n", "|"),
    (THINK, "possible", "\n\n<think>a\n\nb</think>\n\nc|\n\nd", "\n\n", "|"),
    (THINK, "possible", "a|\n\n<think>", "\n\n", "|"),
    (THINK, "possible", "|\n\na", "\n\n", "|"),
    (THINK, "possible", "|<thin", "<", "|"),
    (THINK, "possible", "<think>", "<", None),
    (THINK, "over", "|\n\na</think>b", "\n\n", "|"),
    (THINK, "inside", "a</thi</think>|<b", "<", "|"),
    (THINK, "inside", "ab</think>|ba", "ba", "|"),
    (THINK, "inside", "a</think>|a", "a", "|"),
    (THINK, "over", "a<think>s</think>\n\n|s", "s", "|"),
    (THINK, "possible", "a <think>s</think> <think>s</think>|s", "s", "|"),
    (THINK, "over", 'a"<think>|s', "s", "|"),
    (THINK, "over", "a\n```\n<think>|s", "s", "|"),
    (THINK, "over", "a\n```\n```\n<think>s", "s", None),
    (WRAPPED, "inside", "a<|close|>think<|sep|>\n<|open|>response<|sep|>b|<|close|>", "<", "|"),
    (WRAPPED, "inside", "a<|close|>think<|sep|>|<|op", "<", "|"),
    (SPOKEN, "inside", "a[b[BEGIN FINAL RESPONSE]c|[END", "[", "|"),
    (HARMONY, "possible", "<|channel|>analysis<|message|>a<|end|>" + HEADER + "final<|message|>b|a", "a", "|"),
    (HARMONY, "inside", "a<|end|>" + HEADER + "final <|constrain|>json<|message|>|a", "a", "|"),
    (HARMONY, "possible", "<|channel|>commentary<|message|>b<|end|>" + ANALYSIS, "a", None),
    (HARMONY, "over", "b<|end|>" + ANALYSIS + HEADER + "final<|message|>b|as", "as", "|"),
    (HARMONY, "over", "b|<|en", "<", "|"),
    (HARMONY, "possible", "|a<|end|>", "a", "|"),
]


@settings(max_examples=15)
@pytest.mark.parametrize(("form", "beginning", "text", "stop", "end"), SCOPED)
@given(cuts=st.lists(st.integers(0, 150), max_size=12))
@example(cuts=[])
@example(cuts=list(range(150)))
def test_what_is_thought_ends_no_answer(
    form: Any, beginning: Beginning, text: str, stop: str, end: str | None, cuts: list[int]
) -> None:
    """`|` in the text stands where the stop string is found: behind the thinking, however the text is cut.

    Nothing is shown that is cut off later.
    """
    place = text.rfind("|" + stop) if end else -1
    text = text[:place] + text[place + 1 :] if end else text
    search = search_of(StopStrings([stop]), Thought(form, beginning).stop_scope())
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    found, shown = None, 0
    for start, stopped in zip(edges, [*edges[1:], None], strict=True):
        found = search.append("" if stopped is None else text[start:stopped], ended=stopped is None)
        if found is not None:
            break
        shown = max(shown, 0 if stopped is None else stopped - search.held_back)
    assert found == ((place, stop) if end else None)
    assert shown <= (place if end else len(text))
