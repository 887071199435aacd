"""What keeps the code small enough to be read: how long a function and a file may be."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FUNCTION, FILE = 60, 600
"""Lines."""
TABLES = {("training/facts.py", "town_facts")}
"""Functions that only list."""


def files() -> Iterator[Path]:
    for folder in ("src", "tests", "benchmarks", "training", "examples"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_no_file_is_too_long_to_be_read_at_once() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files()}
    assert {name: length for name, length in lengths.items() if length > FILE} == {}


def test_no_function_is_longer_than_a_screen() -> None:
    long = {}
    for path in files():
        name = str(path.relative_to(ROOT))
        if "kernels" in path.parts:
            continue  # one launch is one function, whatever it has to do
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (name, node.name) not in TABLES:
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > FUNCTION:
                    long[f"{name}: {node.name}"] = length
    assert long == {}


def test_no_test_module_is_imported() -> None:
    """Helpers that several test modules need stand in `tests/support/`."""
    found = []
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                if any(name.startswith("test_") for name in names):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []
