"""Loads in files: what is read, what is written, and what is refused."""

from pathlib import Path

import pytest

from kvern.errors import ConfigError
from kvern.loads.file import as_line, read_file
from kvern.loads.request import LoadRequest

MOONCAKE = """\
{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]}
{"timestamp": 27482, "input_length": 512, "output_length": 52, "hash_ids": [46]}
"""


def test_a_trace_of_mooncake_is_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(MOONCAKE)
    assert list(read_file(file)) == [
        LoadRequest(0.0, 6758, 500, tuple(range(14))),
        LoadRequest(27.482, 512, 52, (46,)),
    ]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    requests = [
        LoadRequest(0.0, 1, 1),
        LoadRequest(0.001234, 600, 20, (1 << 52, 7), "3", "a talk"),
        LoadRequest(2.0, 513, 1, (1, 2), "", "9"),
    ]
    file = tmp_path / "load.jsonl"
    file.write_bytes(b"".join(as_line(request) for request in requests))
    assert list(read_file(file)) == requests
    assert b"tenant" not in file.read_bytes().splitlines()[0]


def test_numbers_name_tenants_and_sessions_and_other_fields_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "load.jsonl"
    line = '{"timestamp": 1.5, "input_length": 9, "output_length": 2, "tenant": 4, "session": 7, "type": "text"}'
    file.write_text("\ufeff" + line)
    assert list(read_file(file)) == [LoadRequest(0.0015, 9, 2, (), "4", "7")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"timestamp": 3, "input_length": 5, "output_length": 1}', "timestamp is 3, below 7 of the line before"),
        (
            '{"timestamp": -1, "input_length": 5, "output_length": 1}',
            "timestamp is -1.0: it must be milliseconds, 0 or",
        ),
        ('{"timestamp": 9, "input_length": -5, "output_length": 1}', "input_length is -5: it must be at least 1"),
        ('{"timestamp": 9, "input_length": 5, "output_length": 0}', "output_length is 0: it must be at least 1"),
        ('{"timestamp": 9, "input_length": 2147483648, "output_length": 1}', "input_length is 2147483648"),
        (
            '{"timestamp": 9, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "hash_ids has 1 hashes and input_length is 513: it must have 2, one for each 512 tokens, or none",
        ),
        ('{"timestamp": 9, "output_length": 1}', "missing required field `input_length`"),
        (
            '{"timestamp": 9, "input_length": "5", "output_length": 1}',
            "Expected `int`, got `str` - at `$.input_length`",
        ),
        ("", "it is empty: each line is one request, without gaps"),
        ("{", "Input data was truncated; it is '{'"),
        ("\xff", "it is '"),
    ],
)
def test_a_wrong_line_is_named_with_its_value_and_the_limit(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "load.jsonl"
    good = '{"timestamp": 7, "input_length": 5, "output_length": 1}\n'
    file.write_bytes(good.encode() + line.encode("latin-1") + b"\n" + good.encode())
    with pytest.raises(ConfigError) as caught:
        list(read_file(file))
    assert str(caught.value).startswith(f"{file}, line 2: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_without_requests_and_one_that_is_none_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(ConfigError, match="has no requests"):
        list(read_file(empty))
    with pytest.raises(ConfigError, match=r"no\.jsonl cannot be read: No such file"):
        list(read_file(tmp_path / "no.jsonl"))
    with pytest.raises(ConfigError, match="cannot be read: it is not a regular file"):
        list(read_file(Path("/dev/zero")))
