"""Log-probabilities as they are packed, told and read."""

import copy
import pickle

import msgspec
import pytest

from kvern.request.events import TokenEvent
from kvern.request.logprobs import Logprob, LogprobTables, PromptTables, joined, packed
from kvern.request.request import PromptInput, Request, RequestSpec
from kvern.request.sampling_params import SamplingParams

PARTS = [packed([5, 7, 5], [-1.5, -0.25, -1.5], 2), packed([9, 1, 2], [-8.0, -0.5, -1.0], 70)]
TABLES = [
    {5: Logprob(-1.5, 2, "t5"), 7: Logprob(-0.25, 1, "t7")},
    {9: Logprob(-8.0, 70, "t9"), 1: Logprob(-0.5, 1, "t1"), 2: Logprob(-1.0, 2, "t2")},
]


def tables(times: int = 1) -> LogprobTables:
    found = LogprobTables({token: f"t{token}" for token in range(10)})
    for rows in PARTS * times:
        found.extend(rows)
    return found


def test_tables_are_read_as_a_list_is() -> None:
    found, expected = tables(3), TABLES * 3
    assert len(found) == 6 and found == expected and expected == found and found != expected[1:]
    assert found[0] == expected[0] and found[-1] == expected[-1] and TABLES[1] in found
    for part in (slice(1, 4), slice(None, None, 2), slice(None, None, -1), slice(4, 1), slice(-2, None), slice(9, 12)):
        assert found[part] == expected[part]
    with pytest.raises(IndexError):
        found[6]
    assert not tables(0) and repr(found) == repr(expected)
    assert [list(table) for table in found[:2]] == [[5, 7], [9, 1, 2]]


def test_the_first_tokens_of_a_prompt_have_no_tables() -> None:
    found, expected = PromptTables(2, tables()), [None, None, *TABLES]
    assert len(found) == 4 and found == expected and (found[1], found[2], found[-1]) == (None, *TABLES)
    assert [found[first:end] for first in range(5) for end in range(5)] == [
        expected[first:end] for first in range(5) for end in range(5)
    ]


def test_copies_are_lists() -> None:
    for copied in (pickle.loads(pickle.dumps(tables())), copy.deepcopy(tables())):
        assert repr(type(copied)) == "<class 'list'>" and copied == TABLES


def test_rows_cross_processes_and_are_cut_and_joined() -> None:
    rows = joined(PARTS)
    assert rows is not None and len(rows) == 2 and rows[:1] == PARTS[0] and rows[1:] == PARTS[1] and not rows[:0]
    assert list(rows.own()) == [-1.5, -8.0] and joined([]) is None
    event = TokenEvent("r", [5, 9], rows)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=TokenEvent) == event


def test_log_probabilities_come_with_their_tokens() -> None:
    params = SamplingParams(logprobs=2, ignore_eos=True).resolved()
    request = Request(RequestSpec("0", PromptInput([3]), params, 99, whole=True))
    told = []
    for number in range(40):
        request.token_ids.append(number)
        news = request.untold([number], packed([number, 1, 2], [-1.0, -0.5, -1.0], 9))
        told += [] if news is None else [news]
    assert [token_ids for token_ids, _ in told] == [[0], list(range(1, 33))]
    for token_ids, rows in told:
        assert rows is not None and [row.token_ids[0] for row in rows.rows()] == token_ids
    request.answer.finish_reason = "abort"
    rest = request.untold([], None)
    assert rest is not None and rest[1] is not None and rest[0] == list(range(33, 40)) and len(rest[1]) == 7
