"""The file of a recorded load: its order, its limits, what it says and what it keeps to itself."""

import asyncio
import json
import math
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvern.errors import ConfigError
from kvern.loads.file import read_file
from kvern.loads.request import LoadRequest
from kvern.request.outputs import CompletionOutput, RequestOutput
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from kvern.server import load_recorder
from kvern.server.load_recorder import LoadRecorder, start
from kvern.serving.workload import Generation
from tests.support.served import KEY, PATIENCE, Served, serving


def ended(tokens: list[int], *answers: int, namespace: bytes = b"", image: bytes = b"") -> list[Generation]:
    """A prompt whose answers have so many tokens."""
    keys = ((0, image),) if image else ()
    spec = RequestSpec("r", PromptInput(tokens, block_keys=keys), ResolvedParams(), 9, namespace=namespace)
    outputs = [CompletionOutput(index, token_ids=[5] * count) for index, count in enumerate(answers)]
    return [Generation(RequestOutput("r", None, tokens, outputs), spec, asyncio.Event(), 0.0, patient=True)]


def recorded(folder: Path, *calls: tuple[str, list[Generation]]) -> list[LoadRequest]:
    """The requests in a file after these have arrived, with their tenants, and ended in the same order."""
    file = folder / "load.jsonl"
    recorder = start(str(file), lambda _: None)
    for tenant, generations in calls:
        recorder.arrived("model", tenant)(generations)
    recorder.close()
    return list(read_file(file))


LONG = list(range(1000, 1600))


def test_equal_beginnings_have_equal_hashes(tmp_path: Path) -> None:
    other = [*LONG[:512], *range(100)]
    first, second, third, fourth = recorded(
        tmp_path, ("a", ended(LONG, 3)), ("a", ended(other, 4)), ("b", ended(LONG, 5)), ("a", ended(LONG[1:], 6))
    )
    assert [one.output_tokens for one in (first, second, third, fourth)] == [3, 4, 5, 6]
    assert (first.prompt_tokens, second.prompt_tokens, fourth.prompt_tokens) == (600, 612, 599)
    assert first.blocks == third.blocks
    assert first.blocks[0] == second.blocks[0] and first.blocks[1] != second.blocks[1]
    assert not set(fourth.blocks) & set(first.blocks)
    assert [one.tenant for one in (first, second, third, fourth)] == ["1", "1", "2", "1"]
    assert first.arrival == 0 and all(block < 1 << 53 for block in first.blocks)


def test_what_shares_no_blocks_has_other_hashes(tmp_path: Path) -> None:
    plain, apart, seen, other = recorded(
        tmp_path,
        ("a", ended(LONG, 1)),
        ("a", ended(LONG, 1, namespace=b"salt")),
        ("a", ended(LONG, 1, image=b"one")),
        ("a", ended(LONG, 1, image=b"two")),
    )
    blocks = [one.blocks[0] for one in (plain, apart, seen, other)]
    assert len(set(blocks)) == 4


def test_two_recordings_of_the_same_prompt_cannot_be_compared(tmp_path: Path) -> None:
    """The key of the hashes is another one each time, so that nobody can try what a prompt may have been."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    (one,), (two,) = (recorded(folder, ("a", ended(LONG, 1))) for folder in folders)
    assert not set(one.blocks) & set(two.blocks)


def test_each_answer_is_a_request_and_what_had_no_token_is_none(tmp_path: Path) -> None:
    found = recorded(tmp_path, ("a", ended(LONG, 7, 0, 9)), ("a", ended(LONG, 0)), ("a", []), ("a", ended([4], 2)))
    assert [(one.prompt_tokens, one.output_tokens) for one in found] == [(600, 7), (600, 9), (1, 2)]
    assert found[0].blocks == found[1].blocks and found[0].arrival == found[1].arrival


def test_requests_stand_in_the_order_of_arrival(tmp_path: Path) -> None:
    file = tmp_path / "load.jsonl"
    recorder = start(str(file), lambda _: None)
    ends = [recorder.arrived("model", "a") for _ in range(4)]
    for number in (2, 0, 3):
        ends[number](ended([7], number + 1))
    recorder.close()
    assert [one.output_tokens for one in read_file(file)] == [1, 3, 4]  # the second has not ended


def test_a_request_that_takes_too_long_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load_recorder, "MOST_HELD", 1000)
    file = tmp_path / "load.jsonl"
    recorder = start(str(file), lambda _: None)
    late, *others = [recorder.arrived("model", "a") for _ in range(20)]
    for number, end in enumerate(others, 2):
        end(ended([7], number))
    late(ended([7], 1))
    recorder.close()
    assert [one.output_tokens for one in read_file(file)] == list(range(2, 21))
    assert [record.message for record in caplog.records] == [
        "the recorded load lacks requests that take so long that those behind them fill the memory"
    ]


def test_a_full_file_ends_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "load.jsonl"
    recorder = start(f"{file}:1KB", lambda _: None)
    for _ in range(50):
        recorder.arrived("model", "a")(ended(LONG, 2))
    recorder.close()
    assert file.stat().st_size <= 1000
    assert 5 < len(list(read_file(file))) < 20
    [said] = [record.message for record in caplog.records]
    assert said == f"the load is not recorded any more: {file} is full: give a larger SIZE, as FILE:SIZE"


def test_a_full_disk_ends_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = LoadRecorder(tmp_path / "load", os.open("/dev/full", os.O_WRONLY), 1_000_000)
    for _ in range(50):
        recorder.arrived("model", "a")(ended(LONG, 2))
    recorder.close()
    [said] = [record.message for record in caplog.records]
    assert said.endswith("load cannot be written: No space left on device")


def test_a_line_that_does_not_fit_on_the_disk_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, write, space = tmp_path / "load.jsonl", os.write, 250

    def write_little(descriptor: int, data: memoryview) -> int:
        nonlocal space
        if not space:
            raise OSError(28, "No space left on device")
        count = write(descriptor, data[: min(100, space)])
        space -= count
        return count

    monkeypatch.setattr(os, "write", write_little)
    assert recorded(tmp_path, *[("a", ended(LONG, 2))] * 9)[-1].prompt_tokens == 600
    assert 100 < file.stat().st_size <= 250
    assert len(caplog.records) == 1


def test_a_disk_that_is_too_slow_ends_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load_recorder, "MOST_QUEUED", 599)
    with pytest.raises(ConfigError, match="has no requests"):
        recorded(tmp_path, *[("a", ended(LONG, 2))] * 9)
    assert [record.message for record in caplog.records] == [
        "the load is not recorded any more: the disk is too slow for it"
    ]


def test_the_file_is_for_its_owner_and_an_earlier_one_is_kept(tmp_path: Path) -> None:
    recorded(tmp_path, ("a", ended([1], 1)))
    recorded(tmp_path, ("a", ended([1], 2)))
    for name, tokens in (("load.jsonl", 2), ("load.jsonl.1", 1)):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        assert [one.output_tokens for one in read_file(tmp_path / name)] == [tokens]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "is no regular file"),
        ("link", "is no regular file"),
        ("no/load", "cannot be written: No such file"),
        ("load:much", "it must be FILE or FILE:SIZE, and the size 'much' must be a number of bytes"),
        ("load:0", "it must be FILE or FILE:SIZE"),
        ("load:" + "9" * 400, "it must be FILE or FILE:SIZE, and the size '999"),
        ("file/load", "cannot be written: .*/file is no folder in which this user may make files"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(ConfigError, match=said):
        start(str(tmp_path / name), print)


def test_a_size_without_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="record is ':1GB': it must be FILE or FILE:SIZE, and has no FILE"):
        start(":1GB", print)


def test_an_empty_file_replaces_no_earlier_record(tmp_path: Path) -> None:
    recorded(tmp_path, ("a", ended([1], 1)))
    for _ in range(3):
        start(str(tmp_path / "load.jsonl"), lambda _: None).close()
    assert [one.output_tokens for one in read_file(tmp_path / "load.jsonl.1")] == [1]


@pytest.mark.parametrize("wrong", ["port", "model"])
def test_a_server_that_does_not_start_leaves_an_earlier_record_alone(tmp_path: Path, wrong: str) -> None:
    recorded(tmp_path, ("a", ended([1], 1)))
    file = tmp_path / "load.jsonl"
    before = file.read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = {
            "port": ("kvern-1m", "--port", str(taken.getsockname()[1])),
            "model": ("kvern-1m", "--max-model-len", "100000000", "--port", "0"),
        }[wrong]
        command = [sys.executable, "-m", "kvern", "serve", *options, "--record", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 2, done.stderr
    assert file.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["load.jsonl"]


def post(served: Served, path: str, key: str, **body: object) -> dict[str, int]:
    status, _, answer = served.raw("POST", path, json.dumps(body).encode(), key)
    assert status == 200, answer
    usage: dict[str, int] = answer["usage"]
    return usage


def test_a_server_records_its_load(tmp_path: Path) -> None:
    """What is there is what clients were told, in the order of arrival, and no text, token or name."""
    file = tmp_path / "load.jsonl"
    options = ("kvern-1m", "--threads", "1", "--max-model-len", "1200", "--record", str(file))
    keys = ("--api-key", f"alice:{KEY}", "--api-key", "robert:other-key")
    question = [{"role": "user", "content": "Where is Paris?"}]
    with serving(*options, *keys) as served:
        assert f"the load is recorded in {file}, 1.00 GB at most" in served.said
        told = [
            post(served, "/v1/completions", KEY, prompt=LONG, max_tokens=9, ignore_eos=True),
            post(served, "/v1/completions", KEY, prompt=LONG, max_tokens=4, ignore_eos=True),
            post(served, "/v1/completions", "other-key", prompt=LONG, max_tokens=4, ignore_eos=True),
            post(served, "/v1/chat/completions", "other-key", max_tokens=5, messages=question),
        ]
        assert served.raw("POST", "/v1/completions", b'{"prompt": []}', KEY)[0] == 400
        several = post(served, "/v1/completions", KEY, prompt=[[5, 6], [7]], max_tokens=3, ignore_eos=True, n=2)
        served.stop()
    found = list(read_file(file))
    lengths = [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in told]
    assert [(one.prompt_tokens, one.output_tokens) for one in found[:4]] == lengths
    assert [(one.prompt_tokens, one.output_tokens) for one in found[4:]] == [(2, 3), (2, 3), (1, 3), (1, 3)]
    assert several["completion_tokens"] == 12
    assert [one.tenant for one in found] == ["1", "1", "2", "2", "1", "1", "1", "1"]
    assert found[0].blocks == found[1].blocks
    assert not set(found[0].blocks) & set(found[2].blocks)  # keys share no blocks
    assert all(len(one.blocks) == math.ceil(one.prompt_tokens / 512) for one in found)
    text = file.read_text()
    assert not [word for word in ("Paris", "alice", "robert", "kvern-1m") if word in text]
