"""Inputs, outputs and runs of batch jobs, as the tests of their formats and of their resumption share them."""

import json
from pathlib import Path
from typing import Any

from kvern import LLM, SamplingParams
from kvern.batch.job import BatchJob, BatchResult
from kvern.batch.requests import RowRules

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompts(count: int) -> list[dict[str, Any]]:
    """Rows whose answers differ in length, so that they finish in another order than they began."""
    return [{"id": index, "prompt": f"the fox {index}", "max_tokens": 2 + index * 7 % 11} for index in range(count)]


def run(llm: LLM, source: Path, output: Path, overwrite: bool = False, **rules: Any) -> BatchResult:
    row_rules = RowRules(**{"params": GREEDY, **rules})
    return BatchJob(source, output, row_rules, identity={"model": "tiny"}, overwrite=overwrite).run(llm)
