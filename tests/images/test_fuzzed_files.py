"""Files that no client should send, against a server: each is answered, and nothing else is harmed."""

import itertools
import random
from pathlib import Path

import pytest

from tests.support.fuzz_images import bombs, damaged, plain_question, probe
from tests.support.fuzz_requests import Findings, send
from tests.support.served import KEY, eventually, serving
from tests.support.vision_models import make_vision_model

SEED = 3
MOST_GROWTH = 192 << 20
"""Bytes that server and engine may have more afterwards."""


def resident(pid: int) -> int:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) << 10


@pytest.mark.nightly
def test_files_harm_their_own_request_alone(tmp_path: Path) -> None:
    folder = make_vision_model("mistral3", tmp_path / "model")
    generator = random.Random(SEED)
    options = ("--dtype", "float32", "--max-model-len", "128", "--threads", "1", "--api-key", KEY)
    with serving("--model", str(folder), *options) as server:
        plain = plain_question(server)
        processes = (server.process.pid, server.engine_pid())

        def held() -> int:
            return sum(map(resident, processes))

        findings = Findings()
        send((server.host, server.port), [probe(damaged(generator)) for _ in range(30)], findings, KEY)
        before = held()
        both = itertools.chain(map(probe, bombs()), (probe(damaged(generator)) for _ in range(20)))
        send((server.host, server.port), both, findings, KEY, width=4)
        assert findings.wrong == []
        statuses = {status for _, status in findings.statuses}
        assert statuses == {200, 400}, "some files are right, and some are not"
        assert plain_question(server) == plain and server.figure("engine_restarts_total") == 0
        eventually(lambda: held() < before + MOST_GROWTH)


@pytest.mark.parametrize("number", range(3))
def test_the_same_seed_makes_the_same_files(number: int) -> None:
    made = [damaged(random.Random(number)) for _ in range(2)]
    assert made[0] == made[1]
