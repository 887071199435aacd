"""Models of a real Triton Inference Server, which kvern answers."""

import contextlib
import json
import os
import signal
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvern.cli.main import main
from tests.support.served import ENGINE, child_of, children_of, command_of, eventually
from tests.support.triton_server import TritonServer, needs_triton, triton

pytestmark = needs_triton
MODEL = "kvern-1m"
GREEDY = {"temperature": 0, "max_tokens": 24}
STORY = {"temperature": 0, "max_tokens": 300, "ignore_eos": True}
PROMPTS = ["Hello", "The capital of France is", "ä ö ü 😀 and"]
TALK = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


class Started:
    """The `kvern serve` that Triton has started for the model `started`."""

    def __init__(self, triton_pid: int) -> None:
        stubs = children_of(triton_pid)
        (self.pid,) = [child for stub in stubs for child in children_of(stub) if "kvern\0serve" in command_of(child)]
        self.socket = Path(command_of(self.pid).split("\0--uds\0")[1].rstrip("\0"))

    def kill_engine(self) -> None:
        os.kill(child_of(self.pid, ENGINE), signal.SIGKILL)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Its engine computes nothing while the block runs."""
        engine = child_of(self.pid, ENGINE)
        os.kill(engine, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGCONT)


@contextlib.contextmanager
def starting(folder: Path) -> Iterator[TritonServer]:
    """A server with the model `started`, whose kvern it has started."""
    with triton(folder / "models", folder) as running:
        options = "--options=--threads 1 --dtype float32 --max-model-len 512"
        assert main(["triton", MODEL, "--out", str(folder / "models"), "--name", "started", options]) == 0
        running.wait()
        running.load("started")
        yield running


def attach(folder: Path, server: TritonServer, kvern: Started) -> None:
    """Have a server load a model that asks the same kvern."""
    assert main(["triton", MODEL, "--out", str(folder / "models"), "--socket", str(kvern.socket)]) == 0
    server.load(MODEL)


@pytest.fixture(scope="module")
def begun(folder: Path) -> Iterator[TritonServer]:
    with starting(folder) as running:
        yield running


@pytest.fixture(scope="module")
def kvern(begun: TritonServer) -> Started:
    return Started(begun.process.pid)


@pytest.fixture(scope="module")
def server(folder: Path, begun: TritonServer, kvern: Started) -> TritonServer:
    attach(folder, begun, kvern)
    return begun


@pytest.fixture(scope="module")
def http(kvern: Started) -> Iterator[httpx.Client]:
    transport = httpx.HTTPTransport(uds=str(kvern.socket))
    with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
        yield client


def asked(http: httpx.Client, route: str = "completions", **body: Any) -> Any:
    return http.post(f"/v1/{route}", json=body).raise_for_status().json()


def running(http: httpx.Client) -> int:
    return sum(int(value) for value in http.get("/load").json().values() if isinstance(value, int))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_texts_are_those_of_completions(server: TritonServer, http: httpx.Client, prompt: str) -> None:
    expected = asked(http, prompt=prompt, **GREEDY)["choices"][0]["text"]
    assert server.ask(MODEL, text_input=prompt, stream=True, sampling=GREEDY).text() == expected
    assert server.ask(MODEL, text_input=prompt, sampling=GREEDY).text() == prompt + expected
    assert server.ask(MODEL, {"max_tokens": 24}, text_input=prompt, stream=True).text() == expected
    status, content = server.call(f"/v2/models/{MODEL}/generate", {"text_input": prompt, "parameters": GREEDY})
    assert (status, json.loads(content)["text_output"]) == (200, prompt + expected)


@pytest.mark.parametrize("stream", [False, True])
def test_conversations_are_answered_as_by_the_chat_route(
    server: TritonServer, http: httpx.Client, stream: bool
) -> None:
    expected = asked(http, "chat/completions", messages=TALK, **GREEDY)["choices"][0]["message"]
    answer = server.ask(MODEL, messages=json.dumps(TALK), stream=stream, return_message=True, sampling=GREEDY)
    outputs = list(answer)
    assert "".join(part for item in outputs for part in item["text_output"]) == expected["content"]
    messages = [json.loads(part) for item in outputs for part in item["message"]]
    assert messages[0]["role"] == "assistant"
    assert "".join(message.get("content") or "" for message in messages) == expected["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_asked_of_an_answer(server: TritonServer, http: httpx.Client, stream: bool) -> None:
    wanted = {f"return_{name}": True for name in ("finish_reason", "num_input_tokens", "num_output_tokens")}
    wanted |= {"return_cumulative_logprob": True, "exclude_input_in_output": True, "stream": stream}
    sampling = {"temperature": 1.0, "seed": 3, "n": 2, "max_tokens": 7}
    outputs = list(server.ask(MODEL, text_input="Once upon", sampling=sampling, **wanted))
    expected = asked(http, prompt="Once upon", logprobs=0, **sampling)
    for index, choice in enumerate(expected["choices"]):
        assert "".join(item["text_output"][index] for item in outputs) == choice["text"]
        assert [item["finish_reason"][index] for item in outputs if item["finish_reason"][index] != "None"] == [
            "length"
        ]
        assert outputs[-1]["cumulative_logprob"][index] == pytest.approx(sum(choice["logprobs"]["token_logprobs"]))
        assert sum(item["num_output_tokens"][index] for item in outputs) == 7
    assert {item["num_input_tokens"][0] for item in outputs} == {expected["usage"]["prompt_tokens"]}
    assert len(outputs) == 1 or stream


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({}, "text_input and messages: give one of them"),
        ({"text_input": "a", "messages": "[]"}, "text_input and messages: give one of them"),
        ({"text_input": "a", "sampling_parameters": "{"}, "sampling_parameters is no JSON"),
        ({"text_input": "a", "sampling_parameters": "[1]"}, "sampling_parameters is '[1]': it must be a JSON object"),
        ({"text_input": "a", "sampling": {"temperature": -1}}, "temperature is -1"),
        ({"text_input": "a", "sampling": {"temperature": -1}, "stream": True}, "temperature is -1"),
        ({"text_input": "a", "sampling": {"lora_name": "other"}}, "other"),
        ({"text_input": "a", "exclude_input_in_output": False, "stream": True}, "exclude_input_in_output is false"),
        ({"text_input": "a" * 20_000}, "the prompt"),
    ],
)
def test_wrong_requests_are_refused(server: TritonServer, inputs: dict[str, Any], said: str) -> None:
    if "sampling_parameters" not in inputs:
        inputs = {"sampling_parameters": json.dumps(inputs.get("sampling", GREEDY)), **inputs}
    inputs.pop("sampling", None)
    with pytest.raises(RuntimeError) as error:
        server.ask(MODEL, **inputs).text()
    assert said in str(error.value)
    status, content = server.call(f"/v2/models/{MODEL}/generate", inputs)
    assert (status, json.loads(content)["error"]) == (400, str(error.value))


def test_a_cancelled_stream_frees_its_blocks(server: TritonServer, kvern: Started, http: httpx.Client) -> None:
    with kvern.held():
        inputs = {"text_input": "Once", "sampling": STORY}
        answers = [server.ask(MODEL, with_status=True, stream=stream, **inputs) for stream in (True, False)]
        eventually(lambda: running(http) == 2)
        for answer in answers:
            answer.cancel()
        eventually(lambda: running(http) == 0)
        for answer in answers:
            with pytest.raises(RuntimeError, match=r"StatusCode\.CANCELLED"):
                answer.text()
    eventually(lambda: figures(http.get("/metrics").text)['kvern:num_requests_running{model_name="kvern-1m"}'] == 0)


def test_a_stream_over_http_that_is_closed_ends(server: TritonServer, http: httpx.Client) -> None:
    """Triton notices a closed connection when it sends the next response."""
    ended = 'kvern:e2e_request_latency_seconds_count{finished_reason="abort",model_name="kvern-1m"}'
    before = figures(http.get("/metrics").text).get(ended, 0)
    url = f"http://127.0.0.1:{server.http}/v2/models/{MODEL}/generate_stream"
    body = {"text_input": "Once", "stream": True, "parameters": STORY}

    def one_is_cut() -> bool:
        with httpx.Client() as client, client.stream("POST", url, json=body) as answer:
            next(answer.iter_raw())
        return figures(http.get("/metrics").text).get(ended, 0) > before

    eventually(one_is_cut)


def test_an_engine_that_is_killed_changes_no_text(server: TritonServer, kvern: Started, http: httpx.Client) -> None:
    expected = asked(http, prompt="Once", **STORY)["choices"][0]["text"]
    with kvern.held():
        answer = server.ask(MODEL, text_input="Once", stream=True, sampling=STORY)
        eventually(lambda: running(http) == 1)
        kvern.kill_engine()
        other = server.ask(MODEL, text_input="Once", stream=True, sampling=STORY)  # there is no engine now
    assert answer.text() == other.text() == expected


def figures(text: str) -> dict[str, float]:
    """kvern's metrics by name and labels: of Triton's those of the model."""
    lines = [
        line.rpartition(" ") for line in text.splitlines() if line.startswith("kvern:") and "_created{" not in line
    ]
    mine = f',triton_model="{MODEL}"'
    return {
        name.replace(mine, ""): float(value) for name, _, value in lines if "triton_model" not in name or mine in name
    }


def test_metrics_are_those_of_kvern(server: TritonServer, http: httpx.Client) -> None:
    assert server.ask(MODEL, text_input="Hello", sampling=GREEDY).text()

    def others() -> set[str]:
        there = figures(http.get("/metrics").text)
        here = figures(server.call("/metrics", port=server.metrics)[1].decode())
        names = here.keys() | there.keys()
        return {name for name in names if here.get(name) != pytest.approx(there.get(name))}

    eventually(lambda: not others())
    assert server.ask(MODEL, text_input="Hello", sampling=GREEDY).text()
    eventually(lambda: not others())


def test_unloading_lets_streams_end(server: TritonServer, kvern: Started, http: httpx.Client) -> None:
    with kvern.held():
        answer = server.ask(MODEL, text_input="Once", stream=True, sampling=STORY)
        eventually(lambda: running(http) == 1)
        server.load(MODEL, "unload")
        eventually(lambda: server.status(f"/v2/models/{MODEL}/ready") != 200)
    assert len(answer.text()) > 300
    server.load(MODEL)
    assert server.ask(MODEL, text_input="Hello", sampling=GREEDY).text()


def test_a_configuration_is_short_and_completed(server: TritonServer, kvern: Started, folder: Path) -> None:
    written = (folder / "models" / MODEL / "config.pbtxt").read_text()
    assert len(written.splitlines()) <= 5
    config = server.config(MODEL)
    assert config["backend"] == "python" and config["model_transaction_policy"] == {"decoupled": True}
    assert config["parameters"] == {"socket": {"string_value": str(kvern.socket)}}
    assert "max_batch_size" not in config  # 0: it is left out
    inputs = {item["name"]: item["data_type"] for item in config["input"] if item["optional"]}
    assert inputs.keys() >= {
        "text_input",
        "image",
        "stream",
        "sampling_parameters",
        "exclude_input_in_output",
        "messages",
    }
    assert {item["name"]: item["data_type"] for item in config["output"]}["text_output"] == "TYPE_STRING"


@pytest.fixture(scope="module")
def tokens(server: TritonServer, kvern: Started, folder: Path) -> TritonServer:
    """The models of the TensorRT-LLM backend."""
    arguments = ["--like", "tensorrtllm", "--socket", str(kvern.socket)]
    assert main(["triton", MODEL, "--out", str(folder / "models"), *arguments]) == 0
    server.load("ensemble")
    return server


@pytest.mark.parametrize("stream", [False, True])
def test_an_ensemble_answers_as_completions_do(tokens: TritonServer, http: httpx.Client, stream: bool) -> None:
    for prompt in PROMPTS:
        expected = asked(http, prompt=prompt, **GREEDY)["choices"][0]["text"]
        inputs = {"text_input": [[prompt]], "max_tokens": [[24]], "temperature": [[0.0]], "stream": [[stream]]}
        outputs = list(tokens.ask("ensemble", **inputs))
        assert "".join(item["text_output"][0][0] for item in outputs) == expected
        assert len(outputs) == 1 or stream
    body = {"text_input": PROMPTS[0], "max_tokens": 5, "temperature": 0.0, "stop_words": [" can"]}
    status, content = tokens.call("/v2/models/ensemble/generate", body)
    assert (status, json.loads(content)["text_output"]) == (200, "! How")


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_in_and_out(tokens: TritonServer, http: httpx.Client, stream: bool) -> None:
    choice = asked(http, prompt="Hello", return_token_ids=True, logprobs=0, **GREEDY)["choices"][0]
    inputs = {"input_ids": [[*choice["prompt_token_ids"], 7]], "input_lengths": [[len(choice["prompt_token_ids"])]]}
    inputs |= {"request_output_len": [[24]], "temperature": [[0.0]], "streaming": [[stream]]}
    outputs = list(tokens.ask("tensorrt_llm", **inputs, return_log_probs=[[True]]))
    ids = [token for item in outputs for token in item["output_ids"][0][0]]
    assert ids == choice["token_ids"] and sum(item["sequence_length"][0][0] for item in outputs) == len(ids)
    sums = sum(choice["logprobs"]["token_logprobs"])
    assert outputs[-1]["cum_log_probs"][0][0] == pytest.approx(sums, abs=1e-5)
    assert sum(value for item in outputs for value in item["output_log_probs"][0][0]) == pytest.approx(sums, abs=1e-5)
    words = tokens.ask("postprocessing", TOKENS_BATCH=[[ids]], SEQUENCE_LENGTH=[[len(ids) - 1]])
    assert [item["OUTPUT"] for item in words] == [[[choice["text"]]]]


def test_beams_have_rows_of_their_own(tokens: TritonServer, http: httpx.Client) -> None:
    expected = asked(http, prompt="Once", use_beam_search=True, n=2, max_tokens=4)["choices"]
    inputs = {"text_input": [["Once"]], "max_tokens": [[4]], "beam_width": [[2]]}
    (output,) = tokens.ask("ensemble", **inputs)
    assert output["text_output"] == [[choice["text"] for choice in expected]]


def test_tokens_that_are_wrong_are_refused(tokens: TritonServer) -> None:
    inputs = {"input_ids": [[1, 2]], "request_output_len": [[4]]}
    with pytest.raises(RuntimeError, match="input_lengths is 3: it must be 1 to the 2 of input_ids"):
        list(tokens.ask("tensorrt_llm", **inputs, input_lengths=[[3]]))
    with pytest.raises(RuntimeError, match="temperature is -1"):
        list(tokens.ask("ensemble", text_input=[["a"]], max_tokens=[[4]], temperature=[[-1.0]]))


class HalfAnswers(socketserver.StreamRequestHandler):
    """A server that is ready, and whose streams end after their first piece; nothing is there for metrics."""

    def handle(self) -> None:
        head = self.rfile.readline()
        if b"/ping" in head:
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
        elif b"/v1/completions" in head:
            self.wfile.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
            self.wfile.write(b'data: {"choices": [{"index": 0, "text": "half", "finish_reason": null}]}\n\n')


def test_an_answer_that_is_cut_off_is_an_error(begun: TritonServer, folder: Path) -> None:
    with socketserver.ThreadingUnixStreamServer(str(folder / "half"), HalfAnswers) as half:
        thread = threading.Thread(target=half.serve_forever)
        thread.start()
        arguments = ["--name", "half", "--socket", str(folder / "half")]
        assert main(["triton", MODEL, "--out", str(folder / "models"), *arguments]) == 0
        begun.load("half")
        pieces = iter(begun.ask("half", text_input="Once", stream=True))
        assert next(pieces)["text_output"] == ["half"]
        with pytest.raises(RuntimeError, match="kvern's server ended before the answer was complete: ask again"):
            next(pieces)
        begun.load("half", "unload")
        half.shutdown()
        thread.join()


def test_unloading_ends_the_server_and_then_its_other_models_are_unavailable(tmp_path: Path) -> None:
    """A server of its own: its kvern ends, and Triton breaks by its own fault once it has told a code."""
    with starting(tmp_path) as server:
        kvern = Started(server.process.pid)
        attach(tmp_path, server, kvern)
        server.load("started", "unload")
        eventually(lambda: not Path(f"/proc/{kvern.pid}").exists() and not kvern.socket.parent.exists())
        with pytest.raises(RuntimeError, match=r"StatusCode.UNAVAILABLE: kvern does not answer at .*socket"):
            server.ask(MODEL, with_status=True, text_input="Once").text()
