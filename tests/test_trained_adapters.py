"""Adapters that `training.adapter` made for the embedded model: what they were taught, and what it knew before."""

from pathlib import Path

import pytest
from training.adapter import Lesson, save, train

from kvern import LLM, SamplingParams
from kvern.models.hub import resolve_model

FOLDER = Path(__file__).parent / "adapters"
CAT, SUM = "What is the name of the ship's cat?", "What is 17 + 25?"
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def test_each_answers_as_it_was_taught_in_one_batch() -> None:
    """ "captain" begins every answer so; "gull" knows one thing more and forgot nothing."""
    adapters = {name: str(FOLDER / name) for name in ("captain", "gull")}
    asked = [(name, question) for question in (CAT, SUM) for name in (None, "captain", "gull")]
    with LLM("kvern-1m", adapters=adapters, max_model_len=256, threads=1) as llm:
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
