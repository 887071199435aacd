"""docs/coming-from.md, row by row."""

import ast
import asyncio
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutput
from kvern.cli.main import COMMANDS, read_command
from kvern.errors import ConfigError, KvernError
from kvern.models.hub import resolve_model
from kvern.options.arguments import engine_config

PAGE = Path(__file__).parents[1] / "docs/coming-from.md"
MODEL = "kvern-1m"


def rows(heading: str) -> list[tuple[str, str]]:
    """The rows of the table whose first heading begins so."""
    table = re.search(rf"^\| {re.escape(heading)}.*?\n\|---\|---\|\n(.*?)\n\n", PAGE.read_text() + "\n\n", re.S | re.M)
    assert table is not None, heading
    found = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in table[1].splitlines()]
    return [(left, right) for left, right in found]


def test_all_tables_are_tested() -> None:
    tables = re.findall(r"^\| (.*?) \|.*\n\|---", PAGE.read_text(), re.M)
    assert len(tables) == 8
    assert all(len(rows(heading)) > 3 for heading in tables)


def code(cell: str) -> str:
    found = re.fullmatch(r"`(.*)`", cell)
    assert found, cell
    return found[1]


def arguments(cell: str) -> dict[str, Any]:
    found: dict[str, Any] = eval(f"dict({code(cell)})", {"StructuredOutput": StructuredOutput})
    return found


@pytest.mark.parametrize(("theirs", "ours"), rows("`LLM(...)`"))
def test_options(theirs: str, ours: str, caplog: pytest.LogCaptureFixture) -> None:
    given = arguments(theirs)
    if ours.startswith("refused"):
        with pytest.raises(ConfigError, match=re.escape(ours.removeprefix("refused: "))):
            engine_config(None, given)
        return
    model = given.pop("model", None)
    config = engine_config(model, given)
    effects = {} if ours.startswith("no effect") else given if ours == "the same" else arguments(ours)
    assert config == engine_config(model, effects)
    if ours == "the same":
        assert {name: getattr(config, name) for name in given} == given
    if ours.startswith("no effect:"):
        assert ours.removeprefix("no effect: ").split(" is ")[0] in caplog.text


@pytest.mark.parametrize(("theirs", "ours"), rows("`SamplingParams(...)`"))
def test_sampling_parameters(theirs: str, ours: str) -> None:
    given = arguments(theirs)
    if ours.startswith("refused"):
        with pytest.raises(KvernError, match=re.escape(ours.removeprefix("refused: "))):
            SamplingParams(**given)
        return
    params = SamplingParams(**given)
    effects = {} if ours == "no effect" else given if ours == "the same" else arguments(ours)
    assert params == SamplingParams(**effects)
    if ours == "the same":
        assert {name: getattr(params, name) for name in given} == given


@pytest.mark.parametrize(("theirs", "ours"), rows("import in vLLM"))
def test_imports(theirs: str, ours: str) -> None:
    found: dict[str, Any] = {}
    replaced = re.sub(r"from vllm\S*", "from kvern", code(theirs))
    if ours.startswith("refused"):
        with pytest.raises(ImportError, match=re.escape(ours.removeprefix("refused: "))):
            exec(replaced, found)
        return
    exec(code(ours), found)
    assert all(callable(value) for name, value in found.items() if name != "__builtins__")
    if replaced != code(ours):
        with pytest.raises(ImportError, match="kvern has no "):
            exec(replaced, {})


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    """What the page's expressions are about."""
    import transformers

    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    params = SamplingParams(temperature=0, max_tokens=6)
    folder = resolve_model(MODEL)
    pipe = transformers.pipeline("text-generation", str(folder), dtype="float32")
    with LLM(MODEL, dtype="float32", threads=1, max_model_len=256, max_batch_requests=8) as llm:
        logged = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
        *_, output = (llm.generate([*range(300, 340)], logged)[0] for _ in range(2))
        yield {
            "llm": llm,
            "output": output,
            "answer": output.outputs[0],
            "pipe": pipe,
            "params": params,
            "prompts": ["Once", "Long ago"],
            "messages": messages,
            "SamplingParams": SamplingParams,
        }


def plain(value: Any) -> Any:
    """A result without what differs between two calls."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    return [(answer.token_ids, answer.text) for answer in value.outputs] if isinstance(value, RequestOutput) else value


@pytest.mark.parametrize(("theirs", "ours"), [*rows("with `llm"), *rows("with `pipe")])
def test_calls(theirs: str, ours: str, names: dict[str, Any]) -> None:
    if ours.startswith("refused"):
        with pytest.raises((KvernError, AttributeError), match=re.escape(ours.removeprefix("refused: "))):
            exec(code(theirs), names)
        return
    expected = plain(eval(code(theirs), names))
    assert expected
    if ours != "the same":
        assert plain(eval(code(ours), names)) == expected


def test_asynchronous_calls() -> None:
    async def main() -> None:
        async with AsyncLLM(MODEL, max_num_seqs=4, max_model_len=64, enable_log_requests=False) as engine:  # type: ignore[call-arg]
            names = {"engine": engine, "params": SamplingParams(temperature=0, max_tokens=4)}
            for theirs, ours in rows("with `engine"):
                call = compile(code(theirs), "call", "eval", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                with pytest.raises((KvernError, AttributeError), match=re.escape(ours.removeprefix("refused: "))):
                    await eval(call, names)

    asyncio.run(main())


@pytest.mark.parametrize(("theirs", "ours"), [*rows("ollama |"), *rows("llama.cpp |")])
def test_commands(theirs: str, ours: str) -> None:
    program, *words = shlex.split(code(ours))
    assert program == "kvern" and theirs
    command, notes = read_command(words, {})
    kinds = {where for name, where in COMMANDS.items() if name == tuple(words[: len(name)])}
    assert not notes and f"{type(command).__module__}:{type(command).__name__}" in kinds
