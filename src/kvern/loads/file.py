"""Loads as files: JSONL as Mooncake publishes its traces, a request a line, in the order of arrival.

    {"timestamp": 1500, "input_length": 600, "output_length": 52, "hash_ids": [7, 8], "tenant": "2", "session": "9"}

Times are milliseconds; hashes are of 512 tokens, none or as many as the prompt has blocks. Tenant and session are
kvern's and may be missing; other fields are ignored.
"""

import math
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

import msgspec

from kvern.errors import ConfigError, shown
from kvern.io.files import open_regular, reason
from kvern.io.json_lines import BYTE_ORDER_MARK
from kvern.loads.request import BLOCK_TOKENS, LoadRequest

MOST_TOKENS = 1 << 31
"""The limit of a length: token counts of engines have 32 bits."""
READ_BYTES = 1 << 20


class _Line(msgspec.Struct, omit_defaults=True, gc=False):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    tenant: str | int = ""
    session: str | int = ""


_decode = msgspec.json.Decoder(_Line).decode
_encode = msgspec.json.Encoder().encode


def read_file(path: Path) -> Iterator[LoadRequest]:
    """Yields the requests of a file. Raises ConfigError, which names the first line that is wrong."""
    try:
        stream = open_regular(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"load {path} cannot be read: {reason(error)}") from None
    before = 0.0
    number = 0
    with BufferedReader(stream, READ_BYTES) as lines:  # type: ignore[type-var]
        for number, line in enumerate(lines, 1):
            try:
                found = _decode(line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line)
                wrong = _wrong(found, before)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                wrong = f"{reason(error)}; it is {shown(line.decode(errors='replace').strip())}"
            if not line.strip():
                wrong = "it is empty: each line is one request, without gaps"
            if wrong:
                raise ConfigError(f"{path}, line {number}: {wrong}")
            before = found.timestamp
            lengths = found.input_length, found.output_length
            yield LoadRequest(round(before / 1000, 6), *lengths, found.hash_ids, str(found.tenant), str(found.session))
    if not number:
        raise ConfigError(f"load {path} has no requests")


def as_line(request: LoadRequest) -> bytes:
    """Returns a request as a line of a file, to a microsecond."""
    at = round(1000 * request.arrival, 3)
    lengths = request.prompt_tokens, request.output_tokens
    line = _Line(int(at) if at.is_integer() else at, *lengths, request.blocks, request.tenant, request.session)
    return _encode(line) + b"\n"


def _wrong(line: _Line, before: float) -> str:
    """Returns what is wrong with a line that follows one with the timestamp `before`; "" if nothing is."""
    at = line.timestamp
    if not 0 <= at < math.inf:
        return f"timestamp is {at}: it must be milliseconds, 0 or more"
    if at < before:
        return f"timestamp is {at:.15g}, below {before:.15g} of the line before: requests stand in order of arrival"
    for name in ("input_length", "output_length"):
        if not 1 <= (length := getattr(line, name)) < MOST_TOKENS:
            return f"{name} is {length}: it must be at least 1 and below {MOST_TOKENS}"
    blocks = math.ceil(line.input_length / BLOCK_TOKENS)
    if len(line.hash_ids) not in (0, blocks):
        what = f"hash_ids has {len(line.hash_ids)} hashes and input_length is {line.input_length}"
        return f"{what}: it must have {blocks}, one for each {BLOCK_TOKENS} tokens, or none"
    return ""
