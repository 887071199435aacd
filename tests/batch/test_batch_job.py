"""Batch jobs with a real engine and real files: formats, order, and rows and files that are wrong."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from kvern import LLM
from kvern.batch import job as job_module
from kvern.errors import BatchFileError
from tests.support.batch_files import GREEDY, prompts, read_rows, run, write_rows
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), max_batch_requests=8) as engine:
        yield engine


def test_answers_keep_the_order_and_the_columns(llm: LLM, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", prompts(30))
    result = run(llm, source, tmp_path / "out.jsonl")
    rows = read_rows(tmp_path / "out.jsonl")
    assert [row["id"] for row in rows] == list(range(30))
    expected = llm.generate("the fox 3", GREEDY.replace(max_tokens=rows[3]["max_tokens"]))[0]
    assert rows[3]["answer"] == expected.outputs[0].text
    assert rows[3]["finish_reason"] == expected.outputs[0].finish_reason
    assert rows[3]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert rows[3]["completion_tokens"] == len(expected.outputs[0].token_ids)
    assert result.totals.rows == 30
    assert result.generated_tokens == sum(row["completion_tokens"] for row in rows)
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_token_ids_and_messages_are_prompts_too(llm: LLM, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "the dog"}]
    ids = llm.chat_prompt(messages)
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": ids}, {"messages": messages}])
    run(llm, source, tmp_path / "out.jsonl")
    by_ids, by_messages = read_rows(tmp_path / "out.jsonl")
    assert by_ids["answer"] == by_messages["answer"]
    assert by_messages["prompt_tokens"] == len(ids)


def test_prompts_can_be_sent_as_messages(llm: LLM, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"question": "the dog"}])
    run(llm, source, tmp_path / "out.jsonl", column="question", chat=True, system="be brief")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the dog"}]
    assert read_rows(tmp_path / "out.jsonl")[0]["answer"] == llm.chat(messages, GREEDY)[0].outputs[0].text


def test_bad_rows_go_to_the_errors_file_and_stop_nothing(llm: LLM, tmp_path: Path) -> None:
    bad: list[tuple[Any, str]] = [
        ("{broken", "not valid JSON"),
        ("[1, 2]", "not a JSON object but list"),
        ({"text": "x"}, "no prompt or messages"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "both prompt and messages"),
        ({"prompt": 5}, "must be a text, a list of token ids"),
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "must be a text, a list of token ids"),
        ({"prompt": [1, 9999]}, "9999"),
        ({"prompt": [7] * 600}, "600"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1"),
        ({"prompt": "a", "temperature": "hot"}, "temperature: expected float"),
        ({"prompt": "a", "top_p": 1.5}, "top_p is 1.5"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": "a", "n": 2}, "n is 2"),
        ({"messages": []}, "must be a text, a list"),
        ({"messages": [{"content": "a"}]}, "has no role"),
    ]
    rows: list[Any] = [{"prompt": "first"}]
    for row, _ in bad:
        rows += [row, {"prompt": "between"}]
    result = run(llm, write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    errors = read_rows(tmp_path / "out.errors.jsonl")
    assert [error["row"] for error in errors] == [2 + 2 * index for index in range(len(bad))]
    for error, (_, reason) in zip(errors, bad, strict=True):
        assert reason in error["error"], error
        assert "\n" not in error["error"]
    assert len(read_rows(tmp_path / "out.jsonl")) == len(bad) + 1
    assert (result.totals.rows, result.totals.failed) == (len(rows), len(bad))


def test_a_file_of_bad_rows_only_is_done(llm: LLM, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["{"] * 600)
    assert run(llm, source, tmp_path / "out.jsonl").totals.failed == 600
    assert len(read_rows(tmp_path / "out.errors.jsonl")) == 600


def test_blank_lines_and_a_byte_order_mark_are_no_rows(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n  \n{"prompt": "b"}\n{')
    run(llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert [row["prompt"] for row in read_rows(tmp_path / "out.jsonl")] == ["a", "b"]
    assert [error["row"] for error in read_rows(tmp_path / "out.errors.jsonl")] == [5]


def test_columns_named_like_answers_are_kept(llm: LLM, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a", "answer": "gold", "input_answer": "older"}])
    run(llm, source, tmp_path / "out.jsonl")
    row = read_rows(tmp_path / "out.jsonl")[0]
    assert (row["input_answer"], row["input_input_answer"]) == ("older", "gold")
    assert row["answer"] not in ("gold", "older")


def test_rows_without_a_seed_differ_and_repeat(llm: LLM, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "same"}] * 6)
    hot = GREEDY.replace(temperature=1.0)
    run(llm, source, tmp_path / "one.jsonl", params=hot)
    run(llm, source, tmp_path / "two.jsonl", params=hot)
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    assert len({row["answer"] for row in read_rows(tmp_path / "one.jsonl")}) > 1


def test_a_narrow_window_changes_nothing(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_rows(tmp_path / "in.jsonl", prompts(25))
    run(llm, source, tmp_path / "wide.jsonl")
    monkeypatch.setattr(job_module, "WINDOW", 3)
    run(llm, source, tmp_path / "narrow.jsonl")
    assert (tmp_path / "wide.jsonl").read_bytes() == (tmp_path / "narrow.jsonl").read_bytes()


def test_openai_batch_rows_are_answered_in_their_format(llm: LLM, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "the fox"}]
    chat = {"model": "any", "messages": messages, "max_completion_tokens": 4, "n": 2, "logprobs": True}
    text = {"model": "any", "prompt": "the fox", "max_tokens": 3, "logprobs": 1, "echo": False}
    rows = [
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {**chat, "top_logprobs": 2}},
        {"custom_id": "t", "method": "POST", "url": "/v1/completions", "body": text},
        {"custom_id": "u", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}},
        {"custom_id": "f", "method": "POST", "url": "/v1/completions", "body": {**text, "stream": True}},
        {"custom_id": "g", "method": "POST", "url": "/v1/completions", "body": {**text, "temprature": 1}},
    ]
    run(llm, write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    first, second = read_rows(tmp_path / "out.jsonl")
    assert (first["custom_id"], first["error"], first["response"]["status_code"]) == ("c", None, 200)
    body = first["response"]["body"]
    assert (body["object"], len(body["choices"])) == ("chat.completion", 2)
    expected = llm.chat(messages, GREEDY.replace(max_tokens=4))[0]
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": expected.outputs[0].text,
        "refusal": None,
    }
    assert [len(entry["top_logprobs"]) == 2 for entry in body["choices"][0]["logprobs"]["content"]] == [True] * 4
    assert body["usage"] == {
        "prompt_tokens": len(expected.prompt_token_ids),
        "completion_tokens": 8,
        "total_tokens": len(expected.prompt_token_ids) + 8,
        "completion_tokens_details": dict.fromkeys(
            ("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"), 0
        ),
    }
    body = second["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == llm.generate("the fox", GREEDY.replace(max_tokens=3))[0].outputs[0].text
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 3
    errors = {error["custom_id"]: error["error"] for error in read_rows(tmp_path / "out.errors.jsonl")}
    assert "/v1/embeddings" in errors["u"]
    assert errors["f"].startswith("stream is True")
    assert errors["g"].startswith("unknown field 'temprature'")


TABLE = {
    "id": [1, 2, 3],
    "prompt": ["the fox", "", 'a "quoted", one\nwith two lines'],
    "temperature": ["not", "a", "parameter"],
}


def write_table(path: Path) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({**TABLE, "score": pyarrow.array([1.5, None, 2.5])}), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(TABLE)
            writer.writerows(zip(*TABLE.values(), strict=True))
    return path


@pytest.mark.parametrize("output", ["out.csv", "out.parquet", "out.jsonl"])
@pytest.mark.parametrize("source", ["in.csv", "in.parquet"])
def test_tables_in_and_out(llm: LLM, tmp_path: Path, source: str, output: str) -> None:
    run(llm, write_table(tmp_path / source), tmp_path / output)
    rows: list[dict[str, Any]]
    if output == "out.csv":
        with (tmp_path / output).open(newline="") as file:
            rows = list(csv.DictReader(file))
    elif output == "out.parquet":
        table = pyarrow.parquet.read_table(tmp_path / output)
        rows = table.to_pylist()
        assert table.schema.field("id").type == (pyarrow.int64() if source == "in.parquet" else pyarrow.string())
    else:
        rows = read_rows(tmp_path / output)
    assert [int(row["id"]) for row in rows] == [1, 3]
    assert rows[1]["prompt"] == TABLE["prompt"][2]
    assert rows[1]["temperature"] == "parameter"
    assert rows[0]["answer"] == llm.generate("the fox", GREEDY)[0].outputs[0].text
    assert int(rows[0]["completion_tokens"]) == 8
    assert [error["row"] for error in read_rows(tmp_path / "out.errors.jsonl")] == [2]
    hidden = {path.name for path in tmp_path.iterdir() if path.name.startswith(".")}
    assert hidden == {f".{output}.progress"}


@pytest.mark.parametrize("output", ["out.csv", "out.parquet"])
def test_rows_with_different_columns_become_a_table(llm: LLM, tmp_path: Path, output: str) -> None:
    rows = [{"prompt": "a", "x": 1}, {"prompt": "b", "y": [1, 2]}, {"prompt": "c", "x": "text", "y": None}]
    run(llm, write_rows(tmp_path / "in.jsonl", rows), tmp_path / output)
    if output == "out.csv":
        with (tmp_path / output).open(newline="") as file:
            found = list(csv.DictReader(file))
        assert [row["x"] for row in found] == ["1", "", "text"]
        assert [row["y"] for row in found] == ["", "[1,2]", ""]
    else:
        found = pyarrow.parquet.read_table(tmp_path / output).to_pylist()
        assert [row["x"] for row in found] == ["1", None, '"text"']
        assert [row["y"] for row in found] == [None, [1, 2], None]
    assert list(found[0])[-4:] == ["answer", "finish_reason", "prompt_tokens", "completion_tokens"]


def test_messages_in_tables(llm: LLM, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "the dog"}]
    expected = llm.chat(messages, GREEDY)[0].outputs[0].text
    pyarrow.parquet.write_table(pyarrow.table({"messages": [messages]}), tmp_path / "in.parquet")
    run(llm, tmp_path / "in.parquet", tmp_path / "a.jsonl")
    with (tmp_path / "in.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["messages"], [json.dumps(messages)], ["not json"]])
    run(llm, tmp_path / "in.csv", tmp_path / "b.jsonl")
    assert [read_rows(tmp_path / name)[0]["answer"] for name in ("a.jsonl", "b.jsonl")] == [expected] * 2
    assert "not valid JSON" in read_rows(tmp_path / "b.errors.jsonl")[0]["error"]


def test_malformed_csv_rows_are_bad_rows(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b"id,prompt\n1,a\n2\n3,b,c\n4,\xff\n5,d\n")
    run(llm, tmp_path / "in.csv", tmp_path / "out.jsonl")
    assert [row["id"] for row in read_rows(tmp_path / "out.jsonl")] == ["1", "5"]
    assert [error["row"] for error in read_rows(tmp_path / "out.errors.jsonl")] == [2, 3, 4]


def unusable_files(folder: Path) -> Iterator[tuple[str, str, str]]:
    write_rows(folder / "in.jsonl", prompts(2))
    (folder / "in.csv").write_text("id,question\n1,a\n")
    (folder / "twice.csv").write_text("prompt,prompt\na,b\n")
    (folder / "empty.csv").write_text("")
    (folder / "bad.parquet").write_text("not parquet")
    (folder / "folder.jsonl").mkdir()
    (folder / "mine.jsonl").write_text("something of mine\n")
    yield "missing.jsonl", "out.jsonl", "missing.jsonl does not exist"
    yield "in.txt", "out.jsonl", "ends in '.txt': it must end in .jsonl"
    yield "in.jsonl", "out", "ends in 'nothing'"
    yield "in.csv", "out.jsonl", "has no column 'prompt' or 'messages' (it has id, question)"
    yield "twice.csv", "out.jsonl", "the column 'prompt' twice"
    yield "empty.csv", "out.jsonl", "is empty"
    yield "bad.parquet", "out.jsonl", "cannot be read as Parquet"
    yield "in.jsonl", "in.jsonl", "is the input itself"
    yield "in.jsonl", "no/such/out.jsonl", "there is no folder"
    yield "in.jsonl", "folder.jsonl", "cannot be written"
    yield "in.jsonl", "mine.jsonl", "add --overwrite"


def test_unusable_files_are_refused_before_anything_is_written(llm: LLM, tmp_path: Path) -> None:
    for source, output, reason in unusable_files(tmp_path):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(BatchFileError) as error:
            run(llm, tmp_path / source, tmp_path / output)
        assert reason in str(error.value)
        assert "\n" not in str(error.value)
        assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "mine.jsonl").read_text() == "something of mine\n"
