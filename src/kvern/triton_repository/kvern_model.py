"""Models of Triton Inference Server (Python backend) whose requests `kvern serve` answers over its Unix socket.

    Triton --execute--> Request, one for each --loop's thread--> kvern serve
    Triton <--responses--- loop's thread <--pieces of answers--- kvern serve

The loop's thread alone makes the calls that cross to Triton's process (responses, cancellation, metrics): made from
several threads, they end the process. `model.py` beside this file says what a request asks, and what Triton gets.
`kvern triton` writes both; they need Python and numpy.
"""

import abc
import asyncio
import collections
import contextlib
import ctypes
import json
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import triton_python_backend_utils as pb_utils

TYPES: dict[str, Any] = {"STRING": np.object_, "FP32": np.float32, "UINT32": np.uint32, "INT32": np.int32}
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
INVALID_ARG = "INVALID_ARG"
UNAVAILABLE = "UNAVAILABLE"
CANCELLED = "CANCELLED"
INTERNAL = "INTERNAL"
TICK = 0.025
LONGEST_TICK = 0.1
"""Seconds between responses of one stream when there are too many of them, with few and with many streams."""
MOST_RESPONSES = 1500
"""Responses per second, of all streams: up to as many pieces of answers become one at once."""
SMOOTHING = 0.2
"""The part of a tick in the mean of its pieces per second."""
CANCEL_SECONDS = 0.06
"""Seconds between questions whether a request was cancelled."""
MOST_QUESTIONS = 2000
"""Such questions per second, of all requests."""
METRIC_SECONDS = 2.0
MOST_UPDATES = 50
"""Metrics that are set in a tick."""
LAST_SECONDS = 10.0
"""Seconds in which cancelled requests end when the model is unloaded; then it goes on without them."""
END_SECONDS = 60.0
"""Seconds that kvern has to end after SIGTERM, with requests of others; then it is killed."""
LOGGED: set[tuple[str, type]] = set()
SAMPLE = re.compile(r"([\w:]+)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Refused(Exception):
    """Raised for a request that cannot be asked as it is."""


@contextlib.contextmanager
def logged(what: str) -> Iterator[None]:
    """A block whose error is logged, once for each kind of error, and does not end the thread."""
    try:
        yield
    except Exception as error:
        if (what, type(error)) not in LOGGED:
            LOGGED.add((what, type(error)))
            logging.warning("kvern: %s: %r (said once)", what, error)


class Request(asyncio.Protocol, abc.ABC):
    """A request of Triton, its connection to kvern, and what has come and is not sent on.

    All but `read`, with `question`, runs in the loop's thread.
    """

    def __init__(self, model: "TritonPythonModel", asked: Any) -> None:
        self._model = model
        self._asked = asked
        self.sender = asked.get_response_sender()
        self.begun = self.told = self.ended = False
        """Flags: a response was sent, one is due, no more will come."""
        self.count = 1
        """The number of answers."""
        self._news: list[dict[str, Any]] = []
        self._error: tuple[str, str] | None = None
        self.logprobs: collections.defaultdict[int, float] = collections.defaultdict(float)
        self.task: Any = None
        self._transport: asyncio.Transport | None = None
        self._question = b""
        self._data = b""
        self._status = 0
        self._is_stream = False

    def read(self) -> None:
        """Reads the inputs; wrong ones end the request."""
        try:
            path, body = self.question()
            self._question = http_request(path, json.dumps(body).encode())
        except Exception as error:  # what one client sends must not end others
            self._error = INVALID_ARG, str(error) if isinstance(error, Refused) else repr(error)
            self.ended = True
        self._asked = None  # it holds the inputs in memory that Triton shares

    def values(self, name: str) -> list[Any]:
        """The elements of an input, empty without it."""
        tensor = pb_utils.get_input_tensor_by_name(self._asked, name)
        return [] if tensor is None else list(tensor.as_numpy().reshape(-1).tolist())

    def value(self, name: str, default: Any = None) -> Any:
        """The first element of an input, texts as str; `default` without the input."""
        for found in self.values(name):
            return found.decode() if isinstance(found, bytes) else found
        return default

    def parameters(self) -> Any:
        """The request's parameters, an object in JSON; empty without them."""
        return self._asked.parameters() or ""

    @abc.abstractmethod
    def question(self) -> tuple[str, dict[str, Any]]:
        """The route of kvern and the body for it. Raises Refused."""

    @abc.abstractmethod
    def outputs(self, news: Sequence[dict[str, Any]]) -> Any:
        """Yields each output's name, type and values: what is new in the chunks, or in the whole answer."""

    def connection_made(self, transport: Any) -> None:
        """Sends the question."""
        self._transport = transport
        if self.ended:
            transport.abort()
        else:
            transport.write(self._question)
            self._question = b""

    def data_received(self, data: bytes) -> None:
        """Reads the answer's head, then events; an answer that is no stream is read at its end."""
        self._data += data
        if not self._status:
            head, found, rest = self._data.partition(b"\r\n\r\n")
            if not found:
                return
            self._status = int(head.split()[1])
            self._is_stream = b"text/event-stream" in head
            self._data = rest
        if self._is_stream:
            *events, self._data = self._data.split(b"\n\n")
            for event in events:
                self._take(event.removeprefix(b"data: "))

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.end()
            return
        content = json.loads(data)
        if "error" in content:
            kind = content["error"]["type"]
            self.fail(code_of(400 if kind == "invalid_request_error" else 503), content["error"]["message"])
            return
        self._news.append(content)
        self._model.tell(self, 1)

    def connection_lost(self, error: Exception | None) -> None:
        """Reads an answer that is no stream; one that is cut off becomes an error."""
        if self.ended:
            return
        content = None
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if self._status and not self._is_stream:
                content = json.loads(self._data)
                content = content if self._status == 200 else content["error"]["message"]
        if content is None:
            self.fail(UNAVAILABLE, "kvern's server ended before the answer was complete: ask again")
        elif self._status != 200:
            self.fail(code_of(self._status), str(content))
        else:
            self._news.append(content)
            self.end()

    def fail(self, code: str, message: str) -> None:
        """Ends the request with an error, unless it has ended."""
        if not self.ended:
            self._error = code, message
            self.end()

    def cancel(self, code: str, message: str) -> None:
        """Ends the request with an error; kvern sees the closed connection, and computes no more."""
        self.fail(code, message)
        if self._transport is not None:
            self._transport.abort()

    def end(self) -> None:
        """No more will come."""
        self.ended = True
        self._model.tell(self, 0)

    def send(self) -> bool:
        """Sends what has come as one response. Returns whether it is the last one."""
        self.told = False
        ended = self.ended
        news, self._news = self._news, []
        error = self._error if ended else None
        if news:
            self.begun = True
            tensors = [
                pb_utils.Tensor(name, np.array(values, TYPES[kind])) for name, kind, values in self.outputs(news)
            ]
            response = pb_utils.InferenceResponse(output_tensors=tensors)
            self.sender.send(response, flags=FINAL if ended and error is None else 0)
        if error is not None:
            self.sender.send(error_response(*error), flags=FINAL)
        elif ended and not news:
            self.sender.send(flags=FINAL)
        return ended


def whole(name: str, value: Any) -> int:
    """Returns a number of answers. Raises Refused."""
    found = int(value) if isinstance(value, float) and value.is_integer() else value
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise Refused(f"{name} is {value!r}: it must be a whole number of at least 1")
    return found


def error_response(code: str, message: str) -> Any:
    """A response without outputs."""
    return pb_utils.InferenceResponse(
        output_tensors=[], error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
    )


def code_of(status: int) -> str:
    """Triton's code for a status of HTTP."""
    if status in (408, 429, 503):
        return UNAVAILABLE
    return INVALID_ARG if status < 500 else INTERNAL


def http_request(path: str, body: bytes | None = None) -> bytes:
    """A request whose answer ends with its connection (HTTP/1.0), and so has no chunks."""
    key = os.environ.get("KVERN_API_KEY", "").partition(",")[0]
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.0", "Host: localhost"]
    lines += [f"Authorization: Bearer {key}"] if key else []
    lines += [] if body is None else ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


def fetch(path: str, route: str, body: bytes | None = None) -> tuple[int, bytes]:
    """The status and content of an answer; status 0 if none comes, or one that is cut off."""
    data = b""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(path)
        connection.sendall(http_request(route, body))
        while part := connection.recv(1 << 16):
            data += part
    head, found, content = data.partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/\S+ (\d+)", head)
    length = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
    if status is None or not found or (length is not None and len(content) < int(length[1])):
        return 0, b""
    return int(status[1]), content


class Figures:
    """kvern's metrics as metrics of Triton, under the same names and labels and with that of Triton's model, as several
    may ask one server. Buckets of histograms are counters."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._families: dict[str, Any] = {}
        self._metrics: dict[str, tuple[Any, float]] = {}
        self.waiting: dict[str, float] = {}
        self._kinds: dict[str, str] = {}
        self._known: set[str] = set()

    def read(self, text: str) -> None:
        """Takes the text of /metrics."""
        waiting: dict[str, float] = {}
        kind = ""
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                kind = line.split()[3]
            elif not line.startswith("#") and kind and (found := SAMPLE.fullmatch(line)):
                self._kinds[found[1]] = "GAUGE" if kind == "gauge" else "COUNTER"
                if not found[1].endswith("_created"):
                    waiting[line.rpartition(" ")[0]] = float(found[3])
        self._known, self.waiting = set(waiting), waiting

    def update(self) -> None:
        """Sets some of the metrics that have changed, and ends those that kvern has no more."""
        for name in self._metrics.keys() - self._known:
            del self._metrics[name]
        for _ in range(min(MOST_UPDATES, len(self.waiting))):
            name, value = self.waiting.popitem()
            with logged("a metric is not set"):
                self._set(name, value)

    def _set(self, name: str, value: float) -> None:
        metric, before = self._metrics.get(name, (None, 0.0))
        if metric is not None and value == before:
            return
        base, labels = name.partition("{")[::2]
        kind = self._kinds[base]
        if metric is None or (value < before and kind == "COUNTER"):  # kvern began again
            if base not in self._families:
                family = pb_utils.MetricFamily
                self._families[base] = family(name=base, description=f"kvern's {base}", kind=getattr(family, kind))
            self._metrics.pop(name, None)
            metric = None  # Triton's metric ends before its successor begins
            read = {key: json.loads(f'"{text}"') for key, text in LABEL.findall(labels)}
            metric, before = self._families[base].Metric(labels=read | {"triton_model": self._model}), 0.0
        if kind == "COUNTER":
            metric.increment(value - before)
        else:
            metric.set(value)
        self._metrics[name] = metric, value


class Pace:
    """The pace of responses: up to MOST_RESPONSES each piece of an answer is one, above that there are ticks."""

    def __init__(self) -> None:
        self._arrived = 0  # pieces since the last tick
        self._rate = 0.0
        self._ticked = 0.0

    def count(self, pieces: int) -> None:
        """Notes pieces that have come."""
        self._arrived += pieces

    @property
    def is_fast(self) -> bool:
        """True while pieces wait for ticks."""
        return self._rate > MOST_RESPONSES

    def following(self, streams: int) -> float:
        """The time of the next tick."""
        return self._ticked + min(max(streams / MOST_RESPONSES, TICK), LONGEST_TICK)

    def tick(self, now: float) -> float:
        """Takes the pieces since the last tick into the rate. Returns the seconds since then."""
        seconds = max(now - self._ticked, TICK)
        self._rate += (1 - (1 - SMOOTHING) ** (seconds / TICK)) * (self._arrived / seconds - self._rate)
        self._arrived = 0
        self._ticked = now
        return seconds


class Questions:
    """Questions whether requests were cancelled: about each every CANCEL_SECONDS, or as often as MOST_QUESTIONS
    allows."""

    def __init__(self) -> None:
        self._due = 0.0
        self._turn: list[Request] = []

    def ask(self, requests: Collection[Request], seconds: float) -> None:
        """Asks as many questions as are due after so many seconds, and cancels what Triton's clients have cancelled."""
        self._due += seconds * min(len(requests) / CANCEL_SECONDS, MOST_QUESTIONS)
        while self._due >= 1:
            self._turn = self._turn or [request for request in list(requests) if not request.ended]
            request = self._turn.pop() if self._turn else None
            if request is not None and request.ended:
                continue
            self._due -= 1
            with logged("it is not known whether a request was cancelled"):
                if request is not None and request.sender.is_cancelled():
                    request.cancel(CANCELLED, "the client cancelled the request")


class TritonPythonModel:
    """A model: it starts `kvern serve`, or finds one that runs, and hands requests over."""

    INPUTS: ClassVar[Mapping[str, tuple[str, list[int]]]]
    OUTPUTS: ClassVar[Mapping[str, tuple[str, list[int]]]]
    """Types and shapes by name."""
    NEEDED: ClassVar[frozenset[str]] = frozenset()
    """Inputs that each request has."""
    MOST: ClassVar = 0
    """`max_batch_size`."""
    REQUEST: ClassVar[type[Request]]

    @classmethod
    def auto_complete_config(cls, config: Any) -> Any:
        """Adds inputs, outputs and the policy to a configuration."""
        for name, (kind, dims) in cls.INPUTS.items():
            entry = {"name": name, "data_type": f"TYPE_{kind}", "dims": dims}
            config.add_input(entry | ({} if name in cls.NEEDED else {"optional": True}))
        for name, (kind, dims) in cls.OUTPUTS.items():
            config.add_output({"name": name, "data_type": f"TYPE_{kind}", "dims": dims})
        config.set_max_batch_size(cls.MOST)
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Starts kvern if parameter `serve` has its command, else finds it at the path `socket`."""
        given = json.loads(args["model_config"])["parameters"]
        parameters = {name: item["string_value"] for name, item in given.items()}
        self._grace = float(parameters.get("grace_seconds", 30))
        self._process: subprocess.Popen[bytes] | None = None
        self._path = parameters.get("socket", "")
        if "serve" in parameters:
            self._start(parameters["serve"], float(parameters.get("start_seconds", 600)))
        elif fetch(self._path, "/ping")[0] != 200:
            message = f"no server is ready at {self._path!r}: start kvern serve MODEL --uds {self._path or 'PATH'}"
            raise pb_utils.TritonModelException(f"{message}, or give its command as parameter serve")
        self._requests: dict[Request, None] = {}
        self._late: dict[Request, None] = {}
        """Requests whose news wait for the next tick."""
        self._ticks = False
        self._pace = Pace()
        self._questions = Questions()
        self._figures = Figures(args["model_name"])
        self._loop = asyncio.new_event_loop()
        self._scraping = self._loop.create_task(self._scrape())
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _start(self, command: str, seconds: float) -> None:
        self._path = f"{tempfile.mkdtemp(prefix='kvern-')}/socket"
        ends_with_us = ctypes.CDLL(None).prctl
        parts = [*shlex.split(command), "--uds", self._path]
        self._process = subprocess.Popen(parts, preexec_fn=lambda: ends_with_us(1, signal.SIGTERM))  # noqa: S603
        began = time.monotonic()
        while fetch(self._path, "/ping")[0] != 200:
            if (code := self._process.poll()) is not None or time.monotonic() - began > seconds:
                self._process.kill()
                self._end_process()
                late = f"was not ready in {seconds:g} s: raise start_seconds"
                raise pb_utils.TritonModelException(
                    f"{command} {late if code is None else f'ended with {code}: see the log'}"
                )
            time.sleep(0.05)

    def is_ready(self) -> bool:
        """Returns whether kvern takes requests. Versions of Triton before 2026 do not ask."""
        return fetch(self._path, "/ping")[0] == 200

    def execute(self, requests: Any) -> None:
        """Hands requests to the loop's thread."""
        for asked in requests:
            request = self.REQUEST(self, asked)
            self._requests[request] = None
            request.read()
            self._loop.call_soon_threadsafe(self._begin, request)

    def finalize(self) -> None:
        """Lets running requests end for `grace_seconds`, then ends the threads and the server that it started."""
        ends = time.monotonic() + self._grace
        while self._requests and time.monotonic() < ends:
            time.sleep(TICK)
        for request in list(self._requests):
            self._loop.call_soon_threadsafe(request.cancel, UNAVAILABLE, "the model is unloaded: ask again")
        ends = time.monotonic() + LAST_SECONDS
        while self._requests and time.monotonic() < ends:
            time.sleep(TICK)
        self._loop.call_soon_threadsafe(self._scraping.cancel)
        self._thread.join()
        self._end_process()

    def _end_process(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(os.path.dirname(self._path), ignore_errors=True)

    def _serve(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._scraping)
        self._loop.close()

    def _begin(self, request: Request) -> None:
        if request.ended:
            self.tell(request, 0)
        else:
            request.task = self._loop.create_task(self._connect(request))
        self._keep_ticking()

    async def _connect(self, request: Request) -> None:
        try:
            await self._loop.create_unix_connection(lambda: request, self._path)
        except OSError as error:
            request.fail(UNAVAILABLE, f"kvern does not answer at {self._path}: {error.strerror or error}")

    async def _scrape(self) -> None:
        while True:
            with logged("metrics are not read"):
                status, text = await self._loop.run_in_executor(None, fetch, self._path, "/metrics")
                if status == 200:
                    self._figures.read(text.decode())
                    self._keep_ticking()
            await asyncio.sleep(METRIC_SECONDS)

    def tell(self, request: Request, pieces: int) -> None:
        """Sends news at once up to MOST_RESPONSES, and first and last ones; else by the next tick."""
        self._pace.count(pieces)
        if request.begun and not request.ended and self._pace.is_fast:
            self._late[request] = None
        elif not request.told:
            request.told = True
            self._loop.call_soon(self._pass_on, request)  # behind what else has come by now

    def _pass_on(self, request: Request) -> None:
        if request not in self._requests:
            return  # its last news went with what came before
        try:
            last = request.send()
        except Exception as error:  # what is wrong with one request must not end the others
            last = True
            request.cancel(INTERNAL, str(error))
            with contextlib.suppress(Exception):
                request.sender.send(error_response(INTERNAL, str(error)), flags=FINAL)
        if last:
            self._requests.pop(request, None)

    def _keep_ticking(self) -> None:
        """Lets the next tick come, unless there is nothing to do for it."""
        if not self._ticks and (self._requests or self._figures.waiting):
            self._ticks = True
            self._loop.call_at(self._pace.following(len(self._requests)), self._tick)

    def _tick(self) -> None:
        """Sends late news, finds cancelled requests, and sets metrics."""
        self._ticks = False
        seconds = self._pace.tick(self._loop.time())
        late, self._late = self._late, {}
        for request in late:
            self._pass_on(request)
        self._questions.ask(self._requests, min(seconds, LONGEST_TICK))
        self._figures.update()
        self._keep_ticking()
