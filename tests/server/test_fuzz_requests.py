"""Every field of every API at every extreme, over a real server: each request is answered or refused by name."""

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvern import SamplingParams
from kvern.request.sampling_params import StructuredOutput
from kvern.server.handlers.batches import ENDPOINTS
from tests.support.fuzz_bodies import BODIES
from tests.support.fuzz_requests import FIXED, Findings, Requests, encoded, places, plain_answer, send
from tests.support.served import KEY, Served, eventually

PAIRS = 1500


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "keys").write_text(f"admin:{KEY} admin=1\n")
    (folder / "adapters").mkdir()
    options = ("--threads", "1", "--max-model-len", "64", "--dtype", "float32", "--data-dir", str(folder / "data"))
    keys = ("--api-key-file", str(folder / "keys"), "--adapter-folder", str(folder / "adapters"))
    served = Served("kvern-1m", *options, *keys)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def requests(server: Served) -> Requests:
    return Requests(server.raw("GET", "/openapi.json")[2], FIXED)


def check(server: Served, probes: Any) -> Findings:
    findings, before = Findings(), plain_answer(server)
    send((server.host, server.port), probes, findings, KEY)
    assert not findings.wrong, "\n".join([f"{len(findings.wrong)} wrong", *findings.wrong[:10]])
    eventually(lambda: server.figure("num_requests_running") + server.figure("num_requests_waiting") == 0)
    assert server.figure("engine_restarts_total") == 0
    assert plain_answer(server) == before
    return findings


@pytest.mark.parametrize("one_of", [31, pytest.param(1, marks=pytest.mark.nightly)])
def test_every_field_alone(server: Served, requests: Requests, one_of: int) -> None:
    """At every extreme, or at one of so many."""
    findings = check(server, itertools.islice(requests.singles(), 0, None, one_of))
    for route in requests.bodies:
        assert findings.statuses[route, 400] > 20 / one_of, route


def test_fields_together(server: Served, requests: Requests) -> None:
    findings = check(server, itertools.islice(requests.several(random.Random(5)), PAIRS))
    assert sum(count for (_, status), count in findings.statuses.items() if status == 200) > PAIRS / 10


def test_nested_bodies_are_good(server: Served, requests: Requests) -> None:
    """Where nothing in them is changed, but for their length."""
    for route, nested in BODIES.items():
        status, _, answer = server.raw("POST", route, json.dumps({**requests.plain(route), **nested}).encode())
        too_long = "prompt is too long" in str(answer) or "tokens with all of its prompt" in str(answer)
        assert status == 200 or too_long, answer


def test_new_fields_are_fuzzed_without_being_named(requests: Requests) -> None:
    found = {path for path, _ in places(requests.bodies["/v1/completions"])}
    sent = [name for name in SamplingParams.__struct_fields__ if name != "stop_scope"]  # which chats set
    assert {(name,) for name in sent} <= found
    assert {("structured", name) for name in StructuredOutput.__struct_fields__} <= found


@pytest.mark.sample(2)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_rows_of_batches(server: Served, requests: Requests, endpoint: str) -> None:
    probes = (probe for probe in requests.several(random.Random(6)) if probe.route == endpoint)
    rows = []
    for number, probe in enumerate(itertools.islice(probes, 150)):
        try:
            body = msgspec.json.decode(probe.body)
        except msgspec.DecodeError:
            continue  # the file is refused for it, as a whole
        body.pop("stream", None)
        rows.append({"custom_id": f"{number}\0", "method": "POST", "url": endpoint, "body": body})
    client = server.client()
    file = client.files.create(file=("rows.jsonl", b"\n".join(encoded(row) for row in rows)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
    batch = client.batches.retrieve(batch.id)
    answers = []
    for file_id in (batch.output_file_id, batch.error_file_id):
        if file_id is not None:
            answers += [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(row["custom_id"] for row in rows)
    assert {answer["response"]["status_code"] for answer in answers} <= {200, 400, 404, 408}
    assert server.figure("engine_restarts_total") == 0
