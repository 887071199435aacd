"""`kvern bench accuracy`: scores of configurations by the embedded model's exam, and by lm-eval."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from training.exam import exam
from training.tokenizer import render

from kvern import LLM, SamplingParams
from kvern.bench import accuracy
from kvern.bench.accuracy import (
    EXAM,
    LONGEST_ANSWER,
    Asked,
    Graded,
    case_of,
    configurations,
    scores_of,
    share,
    sit_exam,
)
from kvern.bench.record import read_record
from kvern.cli.main import main
from kvern.config import EngineConfig
from kvern.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_exam_is_what_training_makes() -> None:
    assert EXAM.read_text(encoding="utf-8") == exam()


def test_scores_are_the_share_of_answers_that_are_right_to_the_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {row["task"]: row for row in reversed([*map(json.loads, exam().splitlines())])}
    rows["arithmetic"]["answer"] = "What nobody answers"
    (tmp_path / "exam.jsonl").write_text("\n".join(map(json.dumps, rows.values())))
    monkeypatch.setattr(accuracy, "EXAM", tmp_path / "exam.jsonl")
    llm = LLM("kvern-1m", threads=1, device="cpu")
    graded = sit_exam(llm, 1, 1)
    params = SamplingParams(temperature=0.0, max_tokens=LONGEST_ANSWER)
    prompts = [
        llm.tokenizer.encode(render(row["messages"], row["tools"], True), add_special_tokens=False)
        for row in rows.values()
    ]
    texts = [output.outputs[0].text for output in llm.generate(prompts, params)]
    llm.close()
    right = {task: float(text == row["answer"]) for (task, row), text in zip(rows.items(), texts, strict=True)}
    first, *others = graded.scores
    assert {score.task: score.value for score in others} == right and right["arithmetic"] == 0 < sum(right.values())
    assert (first.task, first.value) == ("exam", pytest.approx(sum(right.values()) / len(right)))
    assert len(graded.rates) == 1 and graded.rates[0] > 0


def test_standard_errors_and_intervals_are_those_of_a_share() -> None:
    score = share("one", [True] * 3 + [False])
    assert (score.value, score.error) == (0.75, pytest.approx(math.sqrt(0.75 * 0.25 / 4)))
    assert score.interval == pytest.approx((0.3006, 0.9544), abs=1e-4)
    assert share("all", [True] * 16).interval == pytest.approx((0.8064, 1.0), abs=1e-4)


def test_configurations_by_texts() -> None:
    found = configurations(EngineConfig(quantization="int4"), ["quantization=none", "quantization=int8, threads=2"])
    assert [(config.quantization, config.threads) for config in found.values()] == [(None, None), ("int8", 2)]
    assert list(configurations(EngineConfig(), [])) == ["as given"]
    for text, reason in (
        ("quantization", "it must be NAME=VALUE"),
        ("quantisation=int8", "did you mean quantization"),
        ("quantization=int3", "it must be one of fp8, int8, int4"),
    ):
        with pytest.raises(ConfigError, match=reason):
            configurations(EngineConfig(), [text])


def test_the_command_shows_configurations_and_keeps_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "accuracy.json"
    command = ["bench", "accuracy", "kvern-1m", "--device", "cpu", "--threads", "1", "--limit", "1", "--repeat", "1"]
    assert main([*command, "--set", "quantization=none", "quantization=int8", "--json", str(target)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "exam" in line]
    record = read_record(target)
    assert (record.benchmark, record.model) == ("accuracy", "kvern-1m")
    assert (
        [line[0] for line in lines]
        == ["quantization=none", "quantization=int8"]
        == [case.name for case in record.cases]
    )
    for line, case in zip(lines, record.cases, strict=True):
        assert line[3] == f"{case.figures['score'].median:.4f}" and case.figures["tokens_per_second"].main
        assert len(case.details["scores"]) == 14 and case.workload["limit"] == 1


def test_tasks_without_lm_eval_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["bench", "accuracy", "--tasks", "gsm8k"]) == 2
    assert "tasks gsm8k are those of lm-eval, which cannot be imported" in capsys.readouterr().err


def test_a_metric_is_better_the_way_that_lm_eval_says(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "results": {
            "group": {"acc,none": 0.5},
            "told": {
                "alias": "told",
                "ppl,none": 12.5,
                "ppl_stderr,none": 0.5,
                "acc,few": 0.25,
                "acc_stderr,few": "N/A",
            },
        },
        "higher_is_better": {"group": {"acc": None}, "told": {"ppl": False, "acc": True}},
    }
    scores = scores_of(found)
    assert scores[1].interval == (12.5 - 1.96 * 0.5, 12.5 + 1.96 * 0.5)
    assert [(score.metric, score.error, score.better) for score in scores] == [
        ("acc", None, None),
        ("ppl", 0.5, "lower"),
        ("acc", None, "higher"),
    ]
    monkeypatch.setattr(Asked, "grade", lambda asked, llm: Graded(scores, [1.0]))
    case = case_of("one", EngineConfig("kvern-1m", threads=1, device="cpu"), Asked())
    assert (case.figures["score"].median, case.figures["score"].better) == (12.5, "lower")


@pytest.mark.nightly
def test_tasks_of_lm_eval(tmp_path: Path) -> None:
    rows = [{"question": f"What is {number} + 25? The answer is", "answer": number % 3} for number in range(17, 25)]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, kind, more in (
        ("chosen", "multiple_choice", 'doc_to_choice: ["42", "7", "one hundred"]\nmetric_list:\n  - metric: acc'),
        (
            "written",
            "generate_until",
            'generation_kwargs: {until: ["."], max_gen_toks: 8}\nmetric_list:\n  - metric: exact_match',
        ),
    ):
        text = f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: {data}}}\ntest_split: test\n"
        text += f'output_type: {kind}\ndoc_to_text: "{{{{question}}}}"\ndoc_to_target: "{{{{answer}}}}"\n{more}\n'
        (tmp_path / f"{name}.yaml").write_text(text)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "kvern", "bench", "accuracy", "kvern-1m", "--device", "cpu", "--threads", "1"]
    command += ["--tasks", "chosen", "written", "--include-path", str(tmp_path), "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    (case,) = read_record(tmp_path / "found.json").cases
    scores = {score["task"]: score for score in case.details["scores"]}
    assert scores["chosen"]["metric"] == "acc" and 0 <= scores["chosen"]["value"] <= 1 and scores["chosen"]["error"] > 0
    assert scores["written"]["value"] == 0.0 and case.figures["tokens_per_second"].median > 0
    command[command.index("chosen")] = "absent"
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240)
    assert done.returncode == 2 and "lm-eval has no task 'absent'" in done.stderr
