"""Weights that a trainer's process broadcasts to a server that answers."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvern import LLM, SamplingParams
from tests.support.ports import free_port
from tests.support.served import KEY, Served, eventually, serving

ADMIN = "admin-key"
PROMPTS = [[5, 9, 17, *range(40, 110)], [7, 7, 7]]
TOKENS = 16
OPTIONS: dict[str, Any] = {"max_model_len": 256, "kv_cache_tokens": 1024, "threads": 1}
TRAINER = """
import sys
import torch
import torch.distributed as distributed
from safetensors.torch import load_file
address, file, count = sys.argv[1:]
distributed.init_process_group("gloo", init_method=address, rank=0, world_size=2)
for number, (name, tensor) in enumerate(load_file(file).items()):
    if number == int(count):
        sys.exit(1)
    distributed.broadcast(tensor, 0)
distributed.destroy_process_group()
"""
ALL = 1000


@contextlib.contextmanager
def trainer(file: Path, count: int = ALL) -> Iterator[str]:
    """A process that broadcasts the tensors of a file, as many as `count`, and ends; its address."""
    address = f"tcp://127.0.0.1:{free_port()}"
    process = subprocess.Popen([sys.executable, "-c", TRAINER, address, str(file), str(count)], stderr=subprocess.PIPE)
    try:
        yield address
        assert count < ALL or process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def told(file: Path) -> list[dict[str, Any]]:
    return [
        {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for name, tensor in load_file(file).items()
    ]


def update(server: Served, **group: Any) -> tuple[int, dict[str, Any]]:
    body = json.dumps({"group": {"world_size": 2, **group}}).encode()
    status, _, answer = server.raw("POST", "/v1/models/base/weights", body, ADMIN)
    return status, answer


def answers(server: Served) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        body = {"model": "base", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        status, _, answer = server.raw("POST", "/v1/completions", json.dumps(body).encode())
        assert status == 200, answer
        found.append(answer["choices"][0]["token_ids"])
    return found


def expected(folder: Path) -> list[list[int]]:
    with LLM(str(folder), **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def test_a_trainer_brings_weights_and_what_fails_leaves_the_old_ones(tiny_model: Path, tmp_path: Path) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    dice = torch.Generator().manual_seed(1)
    new = {name: weight + 0.1 * torch.randn(weight.shape, generator=dice) for name, weight in weights.items()}
    (tmp_path / "new").mkdir()
    for file in tiny_model.iterdir():
        (tmp_path / "new" / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "new" / "model.safetensors"
    save_file(new, file)
    old, wanted = expected(tiny_model), expected(tmp_path / "new")
    assert old != wanted
    keys = tmp_path / "keys"
    keys.write_text(f"user:{KEY}\nadmin:{ADMIN} admin=1\n")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    places = ("--api-key-file", str(keys), "--data-dir", str(tmp_path / "data"), "--cache-dir", str(tmp_path / "cache"))
    with serving(str(tiny_model), "--served-model-name", "base", *places, *flags) as server:
        assert answers(server) == old
        for group, message in (
            ({"address": "127.0.0.1:1"}, "group.address is '127.0.0.1:1'"),
            ({"address": "tcp://127.0.0.1:1", "rank": 2}, "group.rank is 2"),
            ({"address": "tcp://127.0.0.1:1", "port": 2}, "unknown field `port`"),
            (
                {
                    "address": "tcp://127.0.0.1:1",
                    "tensors": [{"name": "model.norm.weight", "dtype": "float32", "shape": [65]}],
                },
                "model.norm.weight has [65], the served model [64]",
            ),
            ({"address": "tcp://127.0.0.1:1", "timeout": 0.5}, "the process group at tcp://127.0.0.1:1 did not bring"),
        ):
            status, answer = update(server, **{"tensors": told(file), **group})
            assert (status, message in answer["error"]["message"]) == (400, True), (group, answer)
        with trainer(file, count=3) as address:
            status, answer = update(server, address=address, tensors=told(file))
            assert (status, "did not bring" in answer["error"]["message"]) == (400, True), answer
        assert answers(server) == old
        assert not [*(tmp_path / "cache").rglob("weights/*/*.safetensors")], "what failed leaves no file"
        with trainer(file) as address:
            status, answer = update(server, address=address, tensors=told(file))
            assert status == 200, answer
        assert answers(server) == wanted
        restarts = server.figure("engine_restarts_total", ADMIN)
        server.kill_engine()
        eventually(lambda: server.figure("engine_restarts_total", ADMIN) > restarts)
        assert answers(server) == wanted, "the engine that took its place has them, though the trainer has ended"
        assert len([*(tmp_path / "cache").rglob("weights/*/*.safetensors")]) == 1
    assert not [*(tmp_path / "cache").rglob("weights/*/*.safetensors")], "they go with the server"
