"""Weights that are replaced while a server answers: new answers are those of a server that was started with them."""

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern import LLM, SamplingParams
from tests.support.served import KEY, Served, eventually, serving

ADMIN = "admin-key"
PROMPTS = [[5, 9, 17, *range(40, 110)], [7, 7, 7], [*range(100, 180)]]
TOKENS = 24
OPTIONS: dict[str, Any] = {"max_model_len": 512, "kv_cache_tokens": 2048, "threads": 1, "block_size": 16}
Answers = list[list[int]]


def perturbed(weights: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: weight + 0.1 * torch.randn(weight.shape, generator=generator) for name, weight in weights.items()}


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models "old", "new", and "mixed" of both, whose newer tensors are in "some.safetensors", and what is wrong."""
    folder = tmp_path_factory.mktemp("weights")
    weights = load_file(tiny_model / "model.safetensors")
    new = perturbed(weights, 1)
    some = {name: weight for name, weight in perturbed(weights, 2).items() if ".1.self_attn.q_proj" in name}
    for name, tensors in (("old", weights), ("new", new), ("mixed", new | some)):
        shutil.copytree(tiny_model, folder / name)
        save_file(tensors, folder / name / "model.safetensors")
    save_file(some, folder / "some.safetensors")
    save_file(new | {"model.layers.9.mlp.up_proj.weight": torch.ones(2)}, folder / "names.safetensors")
    save_file(new | {"model.norm.weight": torch.ones(65)}, folder / "shape.safetensors")
    save_file(new | {"model.norm.weight": torch.ones(64, dtype=torch.float16)}, folder / "dtype.safetensors")
    save_file(new | {"lm_head.weight": torch.ones(288, 64)}, folder / "head.safetensors")
    whole = (folder / "new" / "model.safetensors").read_bytes()
    (folder / "short.safetensors").write_bytes(whole[:-1000])
    (folder / "pickled").mkdir()
    torch.save(new, folder / "pickled" / "pytorch_model.bin")
    shutil.copytree(folder / "new", folder / "other")
    config = json.loads((folder / "other" / "config.json").read_text())
    (folder / "other" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Answers]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    found = {}
    for name in ("old", "new", "mixed"):
        with LLM(str(folder / name), **OPTIONS) as llm:
            found[name] = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    assert len({str(answers) for answers in found.values()}) == 3
    return found


@contextlib.contextmanager
def started(model: Path, data: Path, *options: str) -> Iterator[Served]:
    keys = data / "keys"
    keys.write_text(f"user:{KEY}\nadmin:{ADMIN} admin=1\n")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    given = ("--served-model-name", "base", "--api-key-file", str(keys), "--data-dir", str(data))
    with serving(str(model), *given, *flags, *options) as served:
        yield served


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that has the old weights at the beginning of each test, and a tier in host memory."""
    with started(folder / "old", tmp_path_factory.mktemp("data"), "--kv-tier", "host:32MB") as served:
        yield served


def complete(server: Served, prompt: list[int], tokens: int = TOKENS) -> dict[str, Any]:
    body = {"model": "base", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    status, _, answer = server.raw("POST", "/v1/completions", json.dumps(body).encode())
    assert status == 200, answer
    found: dict[str, Any] = answer
    return found


def answers(server: Served) -> Answers:
    return [complete(server, prompt)["choices"][0]["token_ids"] for prompt in PROMPTS]


def update(server: Served, path: Path | str, key: str | None = ADMIN, **body: Any) -> tuple[int, dict[str, Any]]:
    content = json.dumps({"path": str(path), **body}).encode()
    status, _, answer = server.raw("POST", "/v1/models/base/weights", content, key)
    return status, answer


def version(server: Served) -> str:
    _, _, models = server.raw("GET", "/v1/models")
    found: str = models["data"][0]["weights_version"]
    return found


def check_updates(server: Served, folder: Path, expected: Mapping[str, Answers]) -> None:
    """New weights, some tensors of others, and the old ones again, each after answers that are cached."""
    assert answers(server) == expected["old"]
    for path, name in (("new", "new"), ("some.safetensors", "mixed"), ("old", "old")):
        status, answer = update(server, folder / path)
        assert (status, answer.get("object"), version(server)) == (200, "weights", answer.get("version")), answer
        assert answers(server) == expected[name], path
        assert answers(server) == expected[name], f"{path}, from the cache"


def test_answers_are_those_of_a_server_with_the_new_weights(
    server: Served, folder: Path, expected: dict[str, Answers]
) -> None:
    before = server.figure("weight_updates_total", ADMIN)
    check_updates(server, folder, expected)
    assert server.figure("weight_updates_total", ADMIN) == before + 3
    assert complete(server, [1], 1)["system_fingerprint"].endswith(f"-{version(server)}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_streams_go_on_and_leave_nothing_to_others(
    server: Served, folder: Path, expected: dict[str, Answers], in_flight: str
) -> None:
    """Answers that run meanwhile are complete, and what they leave is no other's."""
    client = server.client()
    begun, ended = threading.Semaphore(0), list[list[int]]()
    prompt = [*PROMPTS[0], 3]

    def stream(length: int) -> None:
        body = {"ignore_eos": True, "return_token_ids": True}
        tokens: list[int] = []
        for chunk in client.completions.create(
            model="base", prompt=prompt, temperature=0, max_tokens=length, stream=True, extra_body=body
        ):
            for choice in chunk.choices:
                tokens += (choice.model_extra or {}).get("token_ids") or []
            if len(tokens) == 4:
                begun.release()
        ended.append(tokens)

    lengths = [400, 410, 420]
    threads = [threading.Thread(target=stream, args=(length,)) for length in lengths]
    for thread in threads:
        thread.start()
    for _ in threads:
        begun.acquire()
    status, answer = update(server, folder / "new", in_flight=in_flight)
    assert status == 200, answer
    for thread in threads:
        thread.join()
    assert sorted(map(len, ended)) == lengths
    again = [prompt + tokens[:60] for tokens in ended]
    after = [complete(server, one, 8)["choices"][0]["token_ids"] for one in again]
    with LLM(str(folder / "new"), **OPTIONS) as llm:
        wanted = llm.generate(again, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert after == [output.outputs[0].token_ids for output in wanted]
    assert answers(server) == expected["new"]
    assert update(server, folder / "old")[0] == 200


def test_what_is_refused_changes_nothing(server: Served, folder: Path, expected: dict[str, Answers]) -> None:
    before = version(server)
    for path, message in (
        ("names.safetensors", "1 unexpected: model.layers.9.mlp.up_proj.weight"),
        ("shape.safetensors", "model.norm.weight has [65], the served model [64]"),
        ("dtype.safetensors", "model.norm.weight is float16, in the served model float32"),
        ("head.safetensors", "lm_head.weight in"),
        ("short.safetensors", "short.safetensors"),
        ("pickled", "holds no *.safetensors file"),
        ("nothing", "does not exist"),
        ("other", "describes another model than is served: norm"),
        ("old/config.json", "config.json"),
    ):
        status, answer = update(server, folder / path)
        assert (status, message in answer["error"]["message"]) == (400, True), (path, answer)
    for key, status in ((KEY, 403), ("unknown", 401), (None, 401)):
        assert update(server, folder / "new", key)[0] == status
    for body in ({"in_flight": "abort"}, {"group": "nccl"}, {"path": "new"}, {"path": 3}):
        assert update(server, **({"path": folder / "new"} | body))[0] == 400, body
    assert server.raw("POST", "/v1/models/nobody/weights", b"{}", ADMIN)[0] == 404
    assert version(server) == before
    assert answers(server) == expected["old"]


def killed(server: Served) -> None:
    restarts = server.figure("engine_restarts_total", ADMIN)
    server.kill_engine()
    eventually(lambda: server.figure("engine_restarts_total", ADMIN) > restarts)


@pytest.mark.nightly
def test_an_engine_that_is_replaced_has_the_new_weights(
    server: Served, folder: Path, expected: dict[str, Answers], tmp_path: Path
) -> None:
    shutil.copytree(folder / "new", tmp_path / "moved")
    assert update(server, tmp_path / "moved")[0] == 200
    killed(server)
    assert answers(server) == expected["new"]
    assert update(server, folder / "some.safetensors")[0] == 200
    killed(server)
    assert answers(server) == expected["mixed"]
    shutil.rmtree(tmp_path / "moved")
    status, answer = update(server, folder / "some.safetensors")
    assert (status, "does not exist" in answer["error"]["message"]) == (400, True), answer
    assert update(server, folder / "old")[0] == 200, "which has all tensors, so that no other is needed"
    assert answers(server) == expected["old"]


SHARED = {
    "tensor parallel": ("-tp", "2", "--device", "cpu"),
    "stages": ("--pipeline-parallel-size", "2", "--device", "cpu"),
    "replicas": (
        "--data-parallel-size",
        "2",
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[] if how == "replicas" else [pytest.mark.nightly]) for how in SHARED]
)
def test_ranks_stages_and_replicas_change_together(
    folder: Path, expected: dict[str, Answers], tmp_path: Path, how: str
) -> None:
    with started(folder / "old", tmp_path, *SHARED[how]) as server:
        check_updates(server, folder, expected)
        status, answer = update(server, folder / "shape.safetensors")
        assert (status, "has [65]" in answer["error"]["message"]) == (400, True), answer
        assert answers(server) == expected["old"]


@pytest.mark.nightly
def test_one_of_several_models_has_its_weights_again_when_it_is_woken(
    folder: Path, expected: dict[str, Answers], tmp_path: Path
) -> None:
    options = ("--model", f"other={folder / 'mixed'}", "--device", "cpu", "--models-memory", "1GB")
    keys = tmp_path / "keys"
    keys.write_text(f"user:{KEY}\nadmin:{ADMIN} admin=1\n")
    given = ("--model", f"base={folder / 'old'}", "--api-key-file", str(keys), "--data-dir", str(tmp_path))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    with serving(*given, *options, *flags) as server:
        status, answer = update(server, folder / "new")
        assert (status, "base is cold" in answer["error"]["message"]) == (409, True), answer
        assert answers(server) == expected["old"]
        assert update(server, folder / "new")[0] == 200
        assert server.raw("POST", "/v1/models/base/unload", b"", ADMIN)[0] == 200
        assert update(server, folder / "old")[0] == 409
        assert answers(server) == expected["new"]


REFUSED: dict[str, tuple[Callable[[Path], tuple[str, ...]], str]] = {
    "8 bits": (lambda folder: ("--kv-cache-dtype", "int8"), "kv_cache_dtype is int8"),
    "dummy": (lambda folder: ("--load-format", "dummy"), "load_format is dummy"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", [*REFUSED])
def test_engines_that_cannot_change_say_so(folder: Path, tmp_path: Path, what: str) -> None:
    options, message = REFUSED[what]
    with started(folder / "old", tmp_path, *options(folder)) as server:
        status, answer = update(server, folder / "new")
        assert (status, message in answer["error"]["message"]) == (409, True), answer
        assert version(server) == "0"
