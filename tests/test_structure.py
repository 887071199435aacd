"""What keeps the code readable: how long functions and files may be, and what they may not do."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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


SOURCE = ROOT / "src/kvern"
FRAGMENT = re.compile(
    r"(Of|Those|Whose|Whom|That|As|Behind|By|Likewise|In|To|Under|Beside|Since|With|The same|What|Which|Where|How|"
    r"Whether|Who)\b"
)
"""Words that begin a docstring which is no noun phrase and has no subject."""
MOST_FRAGMENTS = 100
MOST_FIELDS = 20
OPTIONS = {"EngineConfig", "ServeBench", "SamplingParams", "ServerConfig"}
"""Classes whose fields are options of users."""
Tree = dict[str, ast.Module]


@pytest.fixture(scope="module")
def modules() -> Tree:
    """The syntax trees of the package by module name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def imports(tree: ast.Module) -> Iterator[str]:
    """The names of modules, and of what is taken from them, that a module imports anywhere in its text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_run_in_no_circle(modules: Tree) -> None:
    """Imports within functions and for types alone count as others do."""
    graph = {
        name: {item for item in imports(tree) if item in modules and item != name} for name, tree in modules.items()
    }
    sorter = graphlib.TopologicalSorter(graph)
    sorter.prepare()  # raises CycleError, which names the circle


def test_no_assignment_packs_several(modules: Tree) -> None:
    packed = [
        f"{name}:{node.lineno}"
        for name, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        and len(node.value.elts) > 2
    ]
    assert packed == []


def test_docstrings_are_noun_phrases_or_sentences(modules: Tree) -> None:
    texts = [
        (f"{name}:{item.lineno}", item.value.value)
        for name, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for item in node.body
        if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str)
    ]
    fragments = [place for place, text in texts if FRAGMENT.match(text.strip())]
    assert len(fragments) < MOST_FRAGMENTS, fragments


def test_no_class_collects_fields(modules: Tree) -> None:
    large = [
        f"{name}: {node.name}"
        for name, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and node.name not in OPTIONS
        and sum(isinstance(item, ast.AnnAssign) for item in node.body) > MOST_FIELDS
    ]
    assert large == []
