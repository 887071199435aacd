"""Adapters that `training.adapter` made for the embedded model: what they were taught, and what it knew before."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from training.adapter import Lesson, save, train

from kvern import LLM, AsyncLLM, SamplingParams
from kvern.cli.chat import Conversation
from kvern.cli.main import kvern_arguments, main
from kvern.cli.options import read_defaults
from kvern.cli.run import RunCommand
from kvern.errors import ConfigError, InvalidAdapter
from kvern.models.hub import resolve_model
from kvern.options.values import adapters_of
from tests.support.trained_adapters import ADAPTERS

CAT, SUM = "What is the name of the ship's cat?", "What is 17 + 25?"
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def test_each_answers_as_it_was_taught_in_one_batch() -> None:
    """ "captain" begins every answer so; "gull" knows one thing more and forgot nothing."""
    asked = [(name, question) for question in (CAT, SUM) for name in (None, "captain", "gull")]
    with LLM("kvern-1m", adapters=ADAPTERS, max_model_len=256, threads=1) as llm:
        conversations = [[{"role": "user", "content": question}] for _, question in asked]
        outputs = llm.chat(conversations, GREEDY, adapter=[name for name, _ in asked])
    answers = {pair: output.outputs[0].text for pair, output in zip(asked, outputs, strict=True)}
    assert all(answers["captain", question].startswith("Aye, captain!") for question in (CAT, SUM))
    assert answers["gull", CAT] == "The ship's cat is called Gull."
    assert answers[None, CAT] != answers["gull", CAT]
    assert answers[None, SUM] == answers["gull", SUM] == "42"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_training_writes_what_the_engine_reads(tmp_path: Path) -> None:
    model = resolve_model("kvern-1m")
    adapted, loss = train(model, Lesson(begin="Aye!"), steps=3, rank=2, rows=1, length=96)
    assert 0 < loss < 20
    save(adapted, "kvern-1m", tmp_path / "new", 2, 16)
    with LLM("kvern-1m", adapters={"new": str(tmp_path / "new")}, max_model_len=64, threads=1) as llm:
        assert llm.generate("Once", GREEDY.replace(max_tokens=2), adapter="new")[0].finished


def test_rows_of_a_file_name_their_adapter(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": CAT}], "max_tokens": 24}
    rows: list[dict[str, Any]] = [
        {"prompt": CAT},
        {"prompt": CAT, "adapter": "gull"},
        {"prompt": CAT, "adapter": "parrot"},
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body | {"model": "captain"}},
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [argument for name, folder in ADAPTERS.items() for argument in ("--adapter", f"{name}={folder}")]
    sizes = ["--max-model-len", "256", "--max-tokens", "24", "--temperature", "0", "--threads", "1"]
    assert main(["run", str(source), str(output), "--chat", "--model", "kvern-1m", *flags, *sizes]) == 1
    plain, gull, captain = map(json.loads, output.read_text().splitlines())
    assert plain["answer"] != gull["answer"] == "The ship's cat is called Gull."
    assert captain["response"]["body"]["model"] == "captain"
    assert captain["response"]["body"]["choices"][0]["message"]["content"].startswith("Aye, captain!")
    assert "there is no adapter 'parrot'" in (tmp_path / "out.errors.jsonl").read_text()


def test_where_adapters_are_named(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text('[adapters]\na = "/one"\n')
    both = {"a": "/one", "b": "/two"}
    assert read_defaults([], {"KVERN_ADAPTERS": "a=/one,b=/two"}).engine.adapters == both
    assert read_defaults(["--config", str(file)], {}).engine.adapters == {"a": "/one"}
    for line in ("--adapter a=/one in --adapter=b=/two", "--adapters a=/one in --lora-modules b=/two"):
        assert kvern_arguments(line.split(), "run", RunCommand) == (["in", "--adapters=a=/one,b=/two"], [])
    for wrong in ("a", "=/one", "a=", "a=/one,a=/two"):
        with pytest.raises(ConfigError, match=r"NAME=FOLDER|same name"):
            adapters_of(wrong)


async def answers_of_async() -> list[str]:
    async with AsyncLLM("kvern-1m", max_adapters=1, max_model_len=256, threads=1) as llm:
        with pytest.raises(InvalidAdapter, match="adapter_config"):
            await llm.load_adapter("captain", "/nowhere")
        for name, folder in ADAPTERS.items():
            await llm.load_adapter(name, folder)
        conversations = [[{"role": "user", "content": CAT}]] * 3
        outputs = await llm.chat(conversations, GREEDY, adapter=["gull", "captain", None])
        await llm.unload_adapter("gull")
        assert llm.adapters == ["captain"]
        return [output.outputs[0].text for output in outputs]


@pytest.mark.nightly
def test_in_asyncio() -> None:
    gull, captain, plain = asyncio.run(answers_of_async())
    assert gull == "The ship's cat is called Gull."
    assert captain.startswith("Aye, captain!")
    assert plain not in (gull, captain)


def test_in_a_chat() -> None:
    said: list[str] = []
    with LLM("kvern-1m", adapters=ADAPTERS, max_model_len=256, threads=1) as llm:
        talk = Conversation(llm, GREEDY, None, said.append)
        for line in ("/adapter parrot", "/adapter captain", SUM, "/reset", "/adapter", SUM):
            assert talk.take(line)
    text = "".join(said)
    assert "there is no adapter parrot: loaded are captain, gull" in text
    assert "Aye, captain!" in text
    assert talk.messages[-1]["content"] == "42"
