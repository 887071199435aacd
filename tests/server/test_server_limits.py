"""Who may use the server and how much: queue, keys, fairness, deadlines, isolation, TLS, sockets, prefixes, logs."""

import concurrent.futures
import contextlib
import json
import re
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx2
import openai
import pytest

from kvern.cli.main import main
from kvern.server.config import ServerConfig
from kvern.server.image_memory import ImageMemory
from kvern.server.key_limits import KeyLimits
from kvern.server.keys import ApiKey, KeyRing, client_of
from kvern.server.service import Admission
from kvern.serving.client import EngineClient
from tests.support.served import ENDLESS, FOREVER, KEY, PATIENCE, SMALL, STORY, Served, eventually, serving

LONG: dict[str, Any] = STORY | {"max_tokens": 450}
ONE_SLOT = ("--max-batch-requests", "1")
KEYS = f"""# who
alice:{KEY}-a concurrent=1
bob:{KEY}-b per_minute=2
carol:{KEY}-c admin=1
dave:{KEY}-d
erin:{KEY}-e
frank:{KEY}-f
gina:{KEY}-g concurrent=0
henk:{KEY}-h per_minute=0
"""


@pytest.fixture(scope="module")
def with_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of one slot, and of keys with limits and without."""
    keys = tmp_path_factory.mktemp("limits") / "keys"
    keys.write_text(KEYS)
    with serving(*SMALL, *ONE_SLOT, "--api-key-file", str(keys)) as served:
        yield served


@pytest.mark.sample(1)
@pytest.mark.parametrize("who", "gh")
def test_a_limit_of_nothing_allows_nothing(with_keys: Served, who: str) -> None:
    """For ever: clients are not told to try again."""
    client = with_keys.client(f"{KEY}-{who}")
    with pytest.raises(openai.PermissionDeniedError, match="may ask no model: its limit of requests is 0") as refused:
        client.completions.create(model="kvern-1m", prompt="a", max_tokens=1)
    assert "retry-after" not in refused.value.response.headers
    assert client.models.list().data


def test_a_full_queue_tells_when_to_come_back() -> None:
    with serving(*SMALL, *ONE_SLOT, "--max-queue", "2") as served:
        client = served.client()
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            with served.held():
                held = [client.completions.create(prompt="Once", stream=True, **LONG) for _ in range(3)]
                with pytest.raises(openai.RateLimitError, match="2 sequences wait already") as full:
                    client.completions.create(prompt="Once", **LONG)
                assert 1 <= int(full.value.response.headers["retry-after"]) <= 60
                most = "asks for 9 sequences, and this server runs and queues 3"
                with pytest.raises(openai.BadRequestError, match=most):
                    client.completions.create(prompt="Once", n=9, **LONG)
            list(pool.map(list, held))
        assert served.figure("requests_refused_total") == 1
        assert client.completions.create(prompt="Once", model="kvern-1m", max_tokens=1).usage.completion_tokens == 1


def test_limits_of_a_key(with_keys: Served) -> None:
    alice, bob = with_keys.client(f"{KEY}-a"), with_keys.client(f"{KEY}-b")
    with with_keys.held():
        stream = alice.completions.create(prompt="Once", stream=True, **LONG)
        with pytest.raises(openai.RateLimitError, match="key alice has 1 requests at the same time"):
            alice.completions.create(prompt="Once", **LONG)
    for _ in range(2):
        bob.completions.create(model="kvern-1m", prompt="Once", max_tokens=1)
    with pytest.raises(openai.RateLimitError, match="key bob has made 2 requests in the last minute") as limited:
        bob.completions.create(model="kvern-1m", prompt="Once", max_tokens=1)
    assert 10 < int(limited.value.response.headers["retry-after"]) <= 60
    list(stream)
    assert alice.completions.create(model="kvern-1m", prompt="Once", max_tokens=1)


def test_what_the_engine_has_does_not_arrive_any_more() -> None:
    admission, key = (
        Admission(
            cast("EngineClient", None), 1, KeyRing(ServerConfig()), KeyLimits(), ImageMemory(1, KeyRing(ServerConfig()))
        ),
        ApiKey("alice", b""),
    )
    with admission.arriving(key, 3) as arrived:
        arrived(2)
        assert admission._arriving == {"alice": 1}
    assert not admission._arriving


def test_no_key_starves_another(with_keys: Served) -> None:
    """One key asks for forty answers; another's single one comes before most of them."""
    greedy, modest = with_keys.client(f"{KEY}-c"), with_keys.client(f"{KEY}-d")
    done: list[str] = []

    def ask(client: openai.OpenAI, name: str) -> None:
        client.completions.create(model="kvern-1m", prompt="Once", max_tokens=60, extra_body={"ignore_eos": True})
        done.append(name)

    with concurrent.futures.ThreadPoolExecutor(41) as pool:
        first = [pool.submit(ask, greedy, "greedy") for _ in range(40)]
        eventually(lambda: with_keys.figure("num_requests_waiting", f"{KEY}-c") >= 20)
        last = pool.submit(ask, modest, "modest")
        for task in (*first, last):
            task.result()
    assert done.index("modest") < 30  # by arrival alone it would be 40


def test_no_address_starves_another(server: Served) -> None:
    """384 streams of one client without a key wait for rows while another is answered, whatever their headers say."""
    body = json.dumps({"prompt": "Once", "stream": True, "n": 128, "max_tokens": 450, "ignore_eos": True})
    with contextlib.ExitStack() as held:
        for number in range(3):
            connection = socket.create_connection((server.host, server.port), PATIENCE, ("127.0.0.2", 0))
            held.enter_context(connection)
            head = f"Host: localhost\r\nX-Forwarded-For: 10.0.0.{number}\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}{body}".encode())
        eventually(lambda: server.figure("num_requests_waiting") > 64)
        assert server.raw("POST", "/v1/completions", b'{"prompt": "Once", "max_tokens": 1}')[0] == 200
        assert server.figure("num_requests_waiting") > 64, "the other was answered when nobody waited any more"
    eventually(lambda: server.figure("num_requests_running") == server.figure("num_requests_waiting") == 0)


def test_who_is_a_client_without_a_key() -> None:
    addresses = ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", "2001:db8::ff:2", "fe80::1%eth0")
    assert [client_of(address) for address in addresses] == ["10.0.0.1"] * 2 + ["2001:db8::/64"] * 2 + ["fe80::/64"]
    anyone = ApiKey("anyone", b"")
    assert (anyone.owner, replace(anyone, client="10.0.0.1").owner) == ("anyone", "anyone 10.0.0.1")
    batches = replace(anyone, client="10.0.0.1", is_batch=True)
    assert batches.owner == batches.line == "anyone batch"


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_ends_a_request(server: Served, stream: bool) -> None:
    options = LONG | {"extra_body": {"ignore_eos": True, "timeout": 0.05}}
    with pytest.raises(openai.APIError, match="timeout has passed"):
        list(server.client().completions.create(prompt="Once", n=8, stream=stream, **options))
    eventually(lambda: server.figure("num_requests_running") == server.figure("kv_cache_usage_perc") == 0)


def cached(client: openai.OpenAI, **extra: Any) -> int:
    prompt = "Tell me a story about a fox and a hen and a bear. " * 8
    answer = client.completions.create(model="kvern-1m", prompt=prompt, max_tokens=1, extra_body=extra)
    return answer.usage.prompt_tokens_details.cached_tokens


def test_caches_of_keys_and_salts_are_apart(with_keys: Served) -> None:
    one, other = with_keys.client(f"{KEY}-e"), with_keys.client(f"{KEY}-f")
    assert (cached(one), cached(other)) == (0, 0)
    assert cached(one) == cached(other) > 50
    assert cached(one, cache_salt="x") == 0
    assert cached(one, cache_salt="x") > 50
    assert cached(one, cache_salt="y") == 0


@pytest.mark.nightly
def test_keys_that_share_their_caches_and_chunks_of_several_tokens() -> None:
    options = ("--share-prefix-cache", "--stream-interval", "10")
    with serving(*SMALL, "--api-key", f"{KEY}-a", f"{KEY}-b", *options) as served:
        one, other = served.client(f"{KEY}-a"), served.client(f"{KEY}-b")
        assert cached(one) == 0
        assert cached(other) > 50
        assert cached(other, cache_salt="x") == 0
        asked = STORY | {"prompt": "Once", "seed": 1, "max_tokens": 45}
        whole = one.completions.create(**asked).choices[0].text
        chunks = list(one.completions.create(stream=True, **asked))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole
        assert len(chunks) <= 6


def test_request_ids_and_logs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    secret = "a secret that nobody may read"
    with serving(*ENDLESS, "--log-requests", "summary", "--api-key", f"alice:{KEY}", log=log) as served:
        client = served.client()
        answer = client.completions.with_raw_response.create(
            model="kvern-1m", prompt=secret, max_tokens=1, extra_headers={"x-request-id": "mine-1"}
        )
        assert answer.headers["x-request-id"] == "mine-1"
        with pytest.raises(openai.BadRequestError, match="x-request-id may have"):
            client.models.list(extra_headers={"x-request-id": "a" * 200})
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="kvern-1m", prompt=[secret], stop=secret * 99, max_tokens=1)
        for path, key, status in (("/health", None, 200), ("/ready", KEY, 200), ("/ready", None, 401)):
            assert served.raw("GET", path, key=key)[0] == status
        assert served.raw("GET", "/v1/models", key="wrong")[0] == 401
        stream = client.completions.create(stream=True, prompt="Once", **FOREVER)
        next(iter(stream))
        stream.close()
        eventually(lambda: served.figure("http_requests_total", key="alice", status="200") == 2)
        eventually(lambda: served.figure("key_generation_tokens_total", key="alice") > 1)
        eventually(lambda: "finish=abort" in log.read_text())
        prompts = served.figure("key_prompt_tokens_total", key="alice")
        assert served.figure("http_requests_total", key="alice", status="400") == 1
        assert served.figure("http_requests_total", key="-", status="400") == 1
        assert served.figure("http_requests_total", key="-", status="401") == 2
    said = log.read_text()
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}"
    end = "key=alice from=127.0.0.1 prompt=(\\d+) cached=0 answer=1 finish=length (?:waits=\\S+ )?[\\d.]+ s"
    line = re.search(rf"^{time} kvern: mine-1 POST /v1/completions 200 {end}$", said, re.MULTILINE)
    assert line is not None and int(line[1]) < prompts
    assert re.search(r"GET /v1/models 401 key=- from=127.0.0.1 [\d.]+ s$", said, re.MULTILINE)
    assert "/health" not in said and said.count("/ready") == 1, "probes that succeed are left out"
    assert secret not in said and KEY not in said


@pytest.mark.nightly
def test_prompts_in_logs(tmp_path: Path) -> None:
    log, secret = tmp_path / "log", "a secret that nobody may read"
    with serving(*SMALL, "--log-requests", "prompts", log=log) as served:
        served.client().completions.create(model="kvern-1m", prompt=secret, max_tokens=1)
        served.client().responses.create(model="kvern-1m", input="and a response", max_output_tokens=1)
    assert secret in log.read_text() and "and a response" in log.read_text()


def test_a_drain_lets_running_requests_end() -> None:
    with serving(*SMALL) as served:
        stream = served.client().completions.create(prompt="Once", stream=True, **LONG)
        next(iter(stream))
        engine = served.engine_pid()
        served.process.send_signal(signal.SIGTERM)
        eventually(lambda: refused(served))
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert served.process.wait(PATIENCE) == 0
    eventually(lambda: not Path(f"/proc/{engine}").exists())


@pytest.mark.nightly
def test_a_second_signal_does_not_wait() -> None:
    with serving(*SMALL, *ONE_SLOT) as served:
        client = served.client()
        with served.held():
            held = [client.completions.create(prompt="Once", stream=True, **LONG) for _ in range(20)]
            served.process.send_signal(signal.SIGTERM)
            eventually(lambda: refused(served))
            served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(PATIENCE) == 0
        ends = [end_of(stream) for stream in held]
        assert not all(ends)


def end_of(stream: Any) -> bool:
    """Whether a stream came to its end."""
    try:
        return list(stream)[-1].choices[0].finish_reason is not None
    except (openai.APIError, httpx2.TransportError, IndexError):
        return False


def refused(served: Served) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((served.host, served.port)) != 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "99999"], "port is 99999: it must be between 0 and 65535"),
        (["--max-queue", "0"], "max_queue is 0: it must be above 0"),
        (["--root-path", "llm/"], "root_path is 'llm/'"),
        (["--tls-key", "k"], "there is no tls_cert"),
        (["--tls-cert", "/nothing"], "tls_cert /nothing cannot be read: No such file"),
        (["--api-key-file", "/nothing"], "api_key_file /nothing cannot be read"),
        (["--api-key", "a:b c=d"], "api_key 1 is not of the form NAME:KEY"),
        (["--api-key", "x:1", "x:2"], "api_key 1 and api_key 2 both name a key x"),
        (["--api-key", "x:1", "y:1"], "api_key 1 and api_key 2 are the same key"),
        (["--api-key", "x:"], "api_key 1 is not of the form NAME:KEY"),
        (["--disk-per-key", "0"], "disk_per_key is 0: it must be above 0"),
        (["--uds", "/nothing/socket"], "cannot listen on /nothing/socket"),
    ],
    ids=range(12),
)
def test_bad_options_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvern serve: error: ") and said in error and error.count("\n") == 1


def test_figures_for_prometheus() -> None:
    with serving(*ENDLESS, "--max-batch-requests", "4") as served:
        client = served.client()
        asked: dict[str, Any] = {"model": "kvern-1m", "extra_body": {"ignore_eos": True}}
        for prompt in ("Once upon a time there was a fox", "Once upon a time there was a fox"):
            client.completions.create(**asked, prompt=prompt, max_tokens=8)
        stream = client.completions.create(prompt="Once", stream=True, **FOREVER)
        next(iter(stream))
        eventually(lambda: served.figure("num_requests_running") == 1)
        assert 0 < served.figure("kv_cache_usage_perc") < 1
        stream.close()
        eventually(lambda: served.figure("num_requests_running") == 0)
        assert served.figure("time_to_first_token_seconds_count") == 3
        assert served.figure("inter_token_latency_seconds_count") >= 7  # drafts that are right come with others
        assert served.figure("e2e_request_latency_seconds_count", finished_reason="length") == 2
        assert served.figure("request_decode_time_seconds_count", finished_reason="abort") == 1
        assert served.figure("request_success_total", finished_reason="length") == 2
        assert served.figure("request_success_total", finished_reason="abort") == 1
        assert served.figure("prefix_cache_hits_total") > 4
        assert served.figure("generation_tokens_total") >= 17
        served.kill_engine()
        eventually(lambda: served.figure("engine_restarts_total") == 1)
        before = served.figure("generation_tokens_total")
        client.completions.create(**asked, prompt="Once", max_tokens=8)
        assert served.figure("generation_tokens_total") == before + 8
