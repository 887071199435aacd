"""Models of Triton with a stand-in for Triton's Python backend and for kvern's server: what goes wrong beside them."""

import contextlib
import importlib
import itertools
import json
import queue
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.served import PATIENCE

OK = b"HTTP/1.0 200 OK\r\n\r\n"
ENDED = b'HTTP/1.0 200 OK\r\ncontent-length: 62\r\n\r\n{"choices": [{"index": 0, "text": "a", "finish_reason": "end"}]}'


class Sender:
    """What Triton sends responses by."""

    def __init__(self, cancelled: bool) -> None:
        self.cancelled = cancelled
        self.sent: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, response: Any = None, flags: int = 0) -> None:
        self.sent.put(response)

    def is_cancelled(self) -> bool:
        if self.cancelled is None:
            raise RuntimeError("Triton does not say")
        return self.cancelled


class Asked:
    """A request of Triton, by its inputs."""

    def __init__(self, inputs: Mapping[str, Any], cancelled: Any = False) -> None:
        self.inputs = inputs
        self.sender = Sender(cancelled)

    def get_response_sender(self) -> Sender:
        return self.sender

    def parameters(self) -> str:
        return ""

    def found(self, name: str) -> Any:
        value = self.inputs.get(name)
        if value is None:
            return None
        return SimpleNamespace(as_numpy=lambda: np.array(value, np.uint64 if name == "random_seed" else None))


class Family:
    """Metrics of Triton; those whose name ends in `bad` cannot be set."""

    GAUGE = COUNTER = 0
    set_ones: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name = name

    def Metric(self, labels: Any) -> Any:  # noqa: N802
        if self.name.endswith("bad"):
            raise RuntimeError("metrics are off")
        return SimpleNamespace(set=lambda value: self.set_ones.put((self.name, value)))


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The files of `triton_repository`, as Triton's Python would import them."""

    class TritonError(SimpleNamespace):
        INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = "INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL"

        def __init__(self, message: str, code: str) -> None:
            super().__init__(message=message, code=code)

    utils = ModuleType("triton_python_backend_utils")
    made = {
        "TRITONSERVER_RESPONSE_COMPLETE_FINAL": 1,
        "TritonError": TritonError,
        "TritonModelException": RuntimeError,
        "InferenceResponse": lambda output_tensors, error=None: SimpleNamespace(outputs=output_tensors, error=error),
        "Tensor": lambda name, values: SimpleNamespace(name=name, values=values),
        "get_input_tensor_by_name": lambda asked, name: asked.found(name),
        "MetricFamily": Family,
    }
    for name, value in made.items():
        setattr(utils, name, value)
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    found = {}
    for name in ("kvern_model", "model", "text_step", "tokens_model"):
        monkeypatch.delitem(sys.modules, f"kvern.triton_repository.{name}", raising=False)
        found[name] = importlib.import_module(f"kvern.triton_repository.{name}")
        monkeypatch.delitem(sys.modules, found[name].__name__)  # at the end nothing of it stays
        monkeypatch.setitem(sys.modules, "kvern_model", found["kvern_model"])
    monkeypatch.setattr(found["kvern_model"], "METRIC_SECONDS", 0.01)
    return found


@contextlib.contextmanager
def kvern(folder: Path, answers: Mapping[str, Iterator[bytes]]) -> Iterator[str]:
    """A server that is ready, and has answers by route; without one it waits until the connection is closed."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            route = self.rfile.readline().split()[1].decode()
            answer = next(answers.get(route, iter((OK,) if route == "/ping" else ())), None)
            if answer is None:
                self.rfile.read()
            else:
                self.wfile.write(answer)

    path = str(folder / "socket")
    with socketserver.ThreadingUnixStreamServer(path, Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.005,))
        thread.start()
        yield path
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def loaded(module: Any, path: str, **parameters: str) -> Iterator[Any]:
    model = module.TritonPythonModel()
    texts = {name: {"string_value": text} for name, text in {"socket": path, **parameters}.items()}
    model.initialize({"model_config": json.dumps({"parameters": texts}), "model_name": "m"})
    try:
        yield model
    finally:
        model.finalize()


def cut(answers: Any) -> dict[str, Iterator[bytes]]:
    return {"/metrics": itertools.repeat(b""), **answers}


def test_a_request_without_news_is_cancelled(modules: dict[str, Any], tmp_path: Path) -> None:
    asked = Asked({"text_input": [b"a"]}, cancelled=True)
    with kvern(tmp_path, cut({})) as path, loaded(modules["model"], path) as model:
        model.execute([asked])
        assert asked.sender.sent.get(timeout=PATIENCE).error.code == "CANCELLED"


def test_each_request_is_asked_about_in_its_turn(modules: dict[str, Any]) -> None:
    """However many have ended meanwhile, and also if there are more than can be asked about in a second."""
    module = modules["kvern_model"]
    questions = module.Questions()
    asked: list[int] = []

    def request(number: int) -> Any:
        sender = SimpleNamespace(is_cancelled=lambda: asked.append(number))
        return SimpleNamespace(ended=False, sender=sender)

    first = [request(0) for _ in range(1000)]
    questions.ask(first, 1.01 / module.MOST_QUESTIONS)
    assert asked == [0]
    for item in first:
        item.ended = True
    asked.clear()
    few = [request(number) for number in (1, 2, 3)]
    for _ in range(4):
        questions.ask(few, 0.5001 * module.CANCEL_SECONDS)
    assert sorted(asked[:3]) == sorted(asked[3:]) == [1, 2, 3], "when all have been asked about, it begins again"
    for item in few:
        item.ended = True
    questions.ask(few, 100 * module.CANCEL_SECONDS)  # there is nothing to ask about, and it ends
    asked.clear()
    questions.ask([request(number) for number in range(10_000)], 0.1)
    assert len(set(asked)) == len(asked) == module.MOST_QUESTIONS // 10


def test_after_a_rest_pieces_are_sent_at_once(modules: dict[str, Any]) -> None:
    module = modules["kvern_model"]
    pace = module.Pace()
    now = 1000.0
    pace.tick(now)
    assert not pace.is_fast
    for _ in range(40):  # a second with twice the pieces that become responses one by one
        pace.count(int(2 * module.MOST_RESPONSES * module.TICK))
        now += module.TICK
        assert pace.following(64) == pytest.approx(now - module.TICK + 64 / module.MOST_RESPONSES)
        assert pace.tick(now) == pytest.approx(module.TICK)
    assert pace.is_fast
    pace.tick(now + 0.001)
    assert pace.is_fast, "a tick without a piece is no rest"
    assert pace.following(0) < now + 10
    assert pace.tick(now + 10) > 9
    assert not pace.is_fast
    pace.count(3)
    pace.tick(now + 10.001)
    assert not pace.is_fast, "a few pieces at once are no rate"
    assert [pace.following(count) - now - 10.001 for count in (1, 10**6)] == pytest.approx(
        [module.TICK, module.LONGEST_TICK]
    )


def test_a_model_is_ready_while_kvern_takes_requests(modules: dict[str, Any], tmp_path: Path) -> None:
    pings = [OK, OK, b"HTTP/1.0 503 Service Unavailable\r\n\r\n", b"", OK]
    with kvern(tmp_path, cut({"/ping": iter(pings)})) as path, loaded(modules["model"], path) as model:
        assert [model.is_ready() for _ in pings[1:]] == [True, False, False, True]
    assert not model.is_ready()


def test_metrics_and_questions_that_fail_end_nothing(
    modules: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def metrics() -> Iterator[bytes]:
        yield from (OK + b"\xff", OK + b"# TYPE a gauge\na x\n", b"HTTP/1.0", b"nothing\r\n\r\n")
        yield b"HTTP/1.0 200 OK\r\nContent-Length: 22\r\n\r\n# TYPE g gauge\ng 1"  # of 12
        yield from itertools.repeat(OK + b"# TYPE g gauge\ng 12\n# TYPE bad gauge\nbad 1\n")

    answers = {"/metrics": metrics(), "/v1/completions": itertools.repeat(ENDED)}
    with kvern(tmp_path, answers) as path, loaded(modules["model"], path) as model:
        assert Family.set_ones.get(timeout=PATIENCE) == ("g", 12)
        asked = Asked({"text_input": [b"a"], "exclude_input_in_output": [True]}, cancelled=None)
        model.execute([asked])
        response = asked.sender.sent.get(timeout=PATIENCE)
        assert response.error is None and response.outputs[0].values.tolist() == [b"a"]
    assert caplog.text.count("metrics are not read: UnicodeDecodeError") == 1


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"n": "2"}, "n is '2': it must be a whole number of at least 1"),
        ({"n": 1.5}, "n is 1.5"),
        ({"n": True}, "n is True"),
        ({"n": 0}, "n is 0"),
        ({"n": 2.0}, None),
        ({"n": None}, None),
    ],
)
def test_counts_of_answers(modules: dict[str, Any], inputs: dict[str, Any], said: str | None) -> None:
    text = json.dumps(inputs).encode()
    request = modules["model"].TextRequest(None, Asked({"text_input": [b"a"], "sampling_parameters": [text]}))
    with contextlib.nullcontext() if said is None else pytest.raises(modules["kvern_model"].Refused, match=said):
        _, body = request.question()
        assert request.count == (body["n"] or 1) and isinstance(request.count, int)


def test_a_body_that_cannot_be_written_is_refused(modules: dict[str, Any], tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(200_000):
        deep = [deep]
    model = modules["model"]

    class Deep(model.TextRequest):  # type: ignore[misc, name-defined]
        def question(self) -> Any:
            return "/v1/completions", {"prompt": deep}

    asked = Asked({})
    with kvern(tmp_path, cut({})) as path, loaded(model, path) as running:
        running.REQUEST = Deep
        running.execute([asked])
        error = asked.sender.sent.get(timeout=PATIENCE).error
        assert error.code == "INVALID_ARG" and "RecursionError" in error.message
    while deep:  # freed level by level
        deep = deep.pop()


def refusal(status: int) -> bytes:
    return f'HTTP/1.0 {status} X\r\n\r\n{{"error": {{"message": "it is so"}}}}'.encode()


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (refusal(400), "INVALID_ARG"),
        (refusal(429), "UNAVAILABLE"),
        (refusal(503), "UNAVAILABLE"),
        (refusal(500), "INTERNAL"),
        (b'HTTP/1.0 200 OK\r\ncontent-length: 30\r\n\r\n{"tok', "UNAVAILABLE"),
        (b'HTTP/1.0 200 OK\r\n\r\n{"tok', "UNAVAILABLE"),
        (b"", "UNAVAILABLE"),
    ],
)
def test_codes_of_text_steps(modules: dict[str, Any], tmp_path: Path, answer: bytes, code: str) -> None:
    parameters = {"socket": {"string_value": str(tmp_path / "socket")}, "step": {"string_value": "preprocessing"}}
    model = modules["text_step"].TritonPythonModel()
    model.initialize({"model_config": json.dumps({"parameters": parameters})})
    with kvern(tmp_path, {"/tokenize": iter([answer])}):
        (response,) = model.execute([Asked({"QUERY": np.array([b"a"], np.object_)})])
    assert response.error.code == code


def test_seeds_and_beams_of_token_requests(modules: dict[str, Any]) -> None:
    def body(**inputs: Any) -> Any:
        inputs = {"input_ids": [[1, 2]], "request_output_len": [[4]], **inputs}
        return modules["tokens_model"].TokensRequest(None, Asked(inputs)).question()[1]

    seeds = {5: 5, 2**63 - 1: 2**63 - 1, 2**63: -(2**63), 2**64 - 2: -2, 2**64 - 1: -2}
    assert {seed: body(random_seed=[[seed]])["seed"] for seed in seeds} == seeds
    assert "seed" not in body()
    with pytest.raises(
        modules["kvern_model"].Refused, match="beam_width is 0: it must be a whole number of at least 1"
    ):
        body(beam_width=[[0]])


def test_unloading_ends_whatever_hangs(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules["kvern_model"], "LAST_SECONDS", 0)
    done: list[str] = []

    class Hanging:
        ended = True

        def cancel(self, code: str, message: str) -> None:
            done.append(code)

    def wait(timeout: float | None = None) -> None:
        done.append("wait")
        if "kill" not in done:
            assert timeout is not None
            raise subprocess.TimeoutExpired("kvern", timeout)

    with kvern(tmp_path, cut({})) as path, loaded(modules["model"], path, grace_seconds="0") as model:
        model._requests[Hanging()] = None
        kill = {name: lambda name=name: done.append(name) for name in ("terminate", "kill")}
        model._process = SimpleNamespace(wait=wait, **kill)
        model._path = str(tmp_path / "own" / "socket")
        Path(model._path).parent.mkdir()
        Path(model._path).touch()
    assert done == ["UNAVAILABLE", "terminate", "wait", "kill", "wait"]
    assert not (tmp_path / "own").exists()
