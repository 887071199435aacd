"""Adapters of a running server: by the name of the model, loaded and unloaded by keys that may."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvern import LLM, SamplingParams
from tests.support.peft_adapters import make_adapter
from tests.support.served import KEY, Served

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT

ADMIN = "admin-key"
Spoil = Callable[[Path], object]
PROMPT = [5, 9, 17, 33, 2, 81]
TOKENS = 16
OPTIONS: dict[str, Any] = {"max_model_len": 256, "kv_cache_tokens": 2048, "threads": 1}


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters "one", "two" and "bad", and one outside, which a link leads to."""
    folder = tmp_path_factory.mktemp("served")
    allowed = folder / "adapters"
    for seed, name in enumerate(("one", "two")):
        make_adapter(tiny_model, allowed / name, seed, r=4)
    shutil.copytree(allowed / "one", folder / "outside")
    shutil.copytree(allowed / "one", allowed / "bad")
    config = allowed / "bad" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    (allowed / "link").symlink_to(folder / "outside")
    return folder


@pytest.fixture(scope="module")
def expected(tiny_model: Path, folder: Path) -> dict[str | None, str]:
    adapters = {name: str(folder / "adapters" / name) for name in ("one", "two")}
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(str(tiny_model), adapters=adapters, **OPTIONS) as llm:
        return {name: llm.generate(PROMPT, params, adapter=name)[0].outputs[0].text for name in (None, "one", "two")}


@pytest.fixture
def server(request: pytest.FixtureRequest, tiny_model: Path, folder: Path, tmp_path: Path) -> Iterator[Served]:
    """A test's own options are the fixture's parameters."""
    keys = tmp_path / "keys"
    keys.write_text(f"user:{KEY}\nadmin:{ADMIN} admin=1\n")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    one, allowed = folder / "adapters" / "one", folder / "adapters"
    served = Served(
        *(str(tiny_model), "--served-model-name", "base", "--adapter", f"one={one}", "--adapter-folder", str(allowed)),
        *("--api-key-file", str(keys), "--data-dir", str(tmp_path), *options, *getattr(request, "param", ())),
    )
    yield served
    served.stop()


def ask(server: Served, model: str, **extra: Any) -> str:
    body = {"temperature": 0, "max_tokens": TOKENS, "extra_body": {"ignore_eos": True}, **extra}
    answer = server.client().completions.create(model=model, prompt=PROMPT, **body)
    assert answer.model == model
    return answer.choices[0].text


def change(server: Served, what: str, key: str = ADMIN, **body: Any) -> tuple[int, dict[str, Any]]:
    status, _, answer = server.raw("POST", f"/v1/{what}_lora_adapter", json.dumps(body).encode(), key)
    return status, answer


RANKS = ("-tp", "2", "--device", "cpu", "--dtype", "float32")


@pytest.mark.parametrize("server", [(), pytest.param(RANKS, marks=pytest.mark.nightly)], ids=str, indirect=True)
def test_adapters_are_models_that_come_and_go(server: Served, folder: Path, expected: dict[str | None, str]) -> None:
    assert ask(server, "base") == expected[None]
    assert ask(server, "one") == expected["one"]
    assert change(server, "load", lora_name="zwei", lora_path="two") == (
        200,
        {"id": "zwei", "object": "adapter", "loaded": True},
    )
    models = {model.id: getattr(model, "parent", None) for model in server.client().models.list()}
    assert models == {"base": None, "one": "base", "zwei": "base"}
    assert ask(server, "zwei") == expected["two"]
    chunks = server.client().chat.completions.create(
        model="zwei", messages=[{"role": "user", "content": "fox"}], stream=True, max_tokens=3
    )
    assert {chunk.model for chunk in chunks} == {"zwei"}
    assert change(server, "unload", lora_name="zwei")[0] == 200
    with pytest.raises(openai.NotFoundError, match="there is no model 'zwei': this server has base, one"):
        ask(server, "zwei")
    assert change(server, "load", lora_name="zwei", lora_path=str(folder / "adapters" / "one"))[0] == 200
    assert ask(server, "zwei") == expected["one"], "not from blocks that the other weights left"


@pytest.mark.nightly
def test_what_is_refused_while_others_are_answered(
    server: Served, folder: Path, expected: dict[str | None, str]
) -> None:
    stop, answers = threading.Event(), set()

    def keep_asking() -> None:
        while not stop.is_set():
            answers.add(ask(server, "one"))

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        for key, path, status, message in (
            (KEY, "two", 403, "admin=1"),
            (ADMIN, "../outside", 403, "not below"),
            (ADMIN, str(folder / "outside"), 403, "not below"),
            (ADMIN, "link", 403, "not below"),
            (ADMIN, "two\0", 400, "lora_path"),
            (ADMIN, "", 400, "lora_path"),
            (ADMIN, "nothing", 400, "adapter_config.json cannot be read"),
            (ADMIN, "bad", 400, "use_dora is True"),
        ):
            found, answer = change(server, "load", key, lora_name="new", lora_path=path)
            assert (found, message in answer["error"]["message"]) == (status, True), (path, answer)
        for name in ("one", "base", "with space", 7):
            assert change(server, "load", lora_name=name, lora_path="two")[0] == 400
        assert change(server, "unload", KEY, lora_name="one")[0] == 403
        assert change(server, "unload", lora_name="base")[0] == 404
        assert change(server, "unload")[0] == 400
    finally:
        stop.set()
        asking.join()
    assert answers == {expected["one"]}


def pipe(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return spoil


def link(name: str, target: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return spoil


def settings(**changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / CONFIG
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return spoil


def header(change: Callable[[dict[str, Any]], str]) -> Spoil:
    """Replace the header by the text that `change` makes of it."""

    def spoil(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        text = change(json.loads(content[8:end])).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + content[end:])

    return spoil


def first_shape(shape: Any) -> Callable[[dict[str, Any]], str]:
    def change(entries: dict[str, Any]) -> str:
        entries[min(set(entries) - {"__metadata__"})]["shape"] = shape
        return json.dumps(entries)

    return change


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NESTED = "[" * 100_000 + "]" * 100_000
SLOW = r"([a-z_.0-9]+)+!"
"""Tries every way to cut a name into pieces."""
HOSTILE: dict[str, tuple[Spoil, str]] = {
    "slow-target": (settings(target_modules=SLOW), " seconds"),  # of computing, or on a busy machine of waiting
    "slow-rank": (settings(rank_pattern={SLOW: 4}), "seconds of computing"),
    "slow-alpha": (settings(alpha_pattern={SLOW: 4}), "seconds of computing"),
    "config-pipe": (pipe(CONFIG), "not a regular file"),
    "weights-pipe": (pipe(WEIGHTS), "not a regular file"),
    "config-zero": (link(CONFIG, "/dev/zero"), "leads out"),
    "weights-zero": (link(WEIGHTS, "/dev/zero"), "leads out"),
    "weights-outside": (link(WEIGHTS, "../one/" + WEIGHTS), "leads out"),
    "circle": (link(CONFIG, CONFIG), "cannot be read"),
    "config-deep": (lambda folder: (folder / CONFIG).write_text('{"r": ' + NESTED + "}"), "nested too deeply"),
    "config-large": (lambda folder: os.truncate(folder / CONFIG, 1 << 40), "at most 1048576"),
    "header-deep": (header(lambda _: '{"x": ' + NESTED + "}"), "nested too deeply"),
    "header-large": (lambda folder: (folder / WEIGHTS).write_bytes((1 << 62).to_bytes(8, "little")), "a header is exp"),
    "shape-float": (header(first_shape([4.0, 64])), "Expected int"),
    "shape-negative": (header(first_shape([-4, -64])), "Expected int"),
    "shape-huge": (header(first_shape([1 << 62, 1 << 62])), "has offsets"),
    "weights-cut": (lambda folder: os.truncate(folder / WEIGHTS, 2000), "cannot be read"),
    "rank-huge": (settings(r=10**30), "adapter_config.json"),
    "alpha-huge": (settings(lora_alpha=10**400), "adapter_config.json"),
}


BY_NIGHT = {"slow-rank", "slow-alpha"}
"""Each is given four seconds of a processor, as a slow target is."""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "names",
    [
        [name for name in HOSTILE if name not in BY_NIGHT],
        pytest.param([name for name in HOSTILE if name in BY_NIGHT], marks=pytest.mark.nightly),
    ],
    ids=["by day", "by night"],
)
def test_hostile_files_are_refused_while_a_stream_goes_on(
    server: Served, folder: Path, expected: dict[str | None, str], names: list[str]
) -> None:
    for name, (spoil, _) in ((name, HOSTILE[name]) for name in names):
        shutil.copytree(folder / "adapters" / "one", folder / "adapters" / name)
        spoil(folder / "adapters" / name)
    stop, answers = threading.Event(), set()

    def keep_asking() -> None:
        while not stop.is_set():
            answers.add(ask(server, "one"))

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        for name, (_, message) in ((name, HOSTILE[name]) for name in names):
            status, answer = change(server, "load", lora_name="new", lora_path=name)
            assert (status, message in answer["error"]["message"]) == (400, True), (name, answer)
            assert "\n" not in answer["error"]["message"]
    finally:
        stop.set()
        asking.join()
    assert answers == {expected["one"]}
    assert server.figure("engine_restarts_total", ADMIN) == 0
    assert change(server, "load", lora_name="new", lora_path="two")[0] == 200
    assert change(server, "unload", lora_name="one")[0] == 200
    assert change(server, "load", lora_name="one", lora_path="one")[0] == 200, "the command line's name is free again"


@pytest.mark.nightly
def test_a_new_engine_has_the_adapters_of_the_one_that_died(server: Served, expected: dict[str | None, str]) -> None:
    assert change(server, "load", lora_name="zwei", lora_path="two")[0] == 200
    stream = server.client().completions.create(
        model="zwei", prompt=PROMPT, temperature=0, max_tokens=TOKENS, stream=True, extra_body={"ignore_eos": True}
    )
    text = next(stream).choices[0].text
    server.kill_engine()
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == expected["two"]
    assert (ask(server, "zwei"), ask(server, "one")) == (expected["two"], expected["one"])


@pytest.mark.nightly
def test_a_server_without_a_folder_loads_nothing_later(tiny_model: Path, folder: Path, tmp_path: Path) -> None:
    served = Served(str(tiny_model), "--threads", "1", "--max-model-len", "64", "--data-dir", str(tmp_path))
    try:
        status, answer = change(served, "load", lora_name="one", lora_path=str(folder / "adapters" / "one"))
        assert (status, answer["error"]["code"]) == (403, "permission_denied")
    finally:
        served.stop()


@pytest.mark.nightly
def test_a_bad_adapter_of_the_command_line_ends_the_start(tiny_model: Path, folder: Path) -> None:
    bad = f"--adapter=bad={folder / 'adapters' / 'bad'}"
    command = [sys.executable, "-m", "kvern", "serve", str(tiny_model), "--port", "0", "--max-model-len", "64", bad]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, "use_dora is True" in ended.stderr, "Traceback" in ended.stderr) == (2, True, False)
