"""What keeps the code readable: how long functions and files may be, and what they may not do."""

import ast
import graphlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/kvern"
FUNCTION, FILE = 60, 600
"""Lines."""
SOURCE_LINES = 143_534
"""Lines of Python and C++ in src."""
TABLES = {("training/facts.py", "town_facts")}
"""Functions that only list."""
MOST_PARAMETERS = 7
FRAGMENT = re.compile(
    r"(Of|Those|Whose|Whom|That|As|Behind|By|Likewise|In|To|Under|Beside|Since|With|The same|What|Which|Where|How|"
    r"Whether|Who)\b"
)
"""Words that begin a docstring which is no noun phrase and has no subject."""
MOST_FRAGMENTS = 3
MOST_FIELDS = 20
OPTIONS = {"EngineConfig", "ServeBench", "SamplingParams", "ServerConfig"}
"""Classes whose fields are options of users."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


@dataclass
class Found:
    """What a file has, each with its line where that is not said.

    functions   name, line, lines, parameters besides self
    imports     names of modules, and of what is taken from them, anywhere in the text, and their lines
    packed      assignments of three values and more to as many names
    texts       docstrings, and texts after fields and constants
    classes     name, number of fields
    """

    lines: int
    functions: list[tuple[str, int, int, int]] = field(default_factory=list)
    imports: list[tuple[str, int]] = field(default_factory=list)
    packed: list[int] = field(default_factory=list)
    texts: list[tuple[str, int]] = field(default_factory=list)
    classes: list[tuple[str, int]] = field(default_factory=list)


def files() -> Iterator[Path]:
    for folder in ("src", "tests", "benchmarks", "training", "examples"):
        yield from sorted((ROOT / folder).rglob("*.py"))


@cache
def found(path: Path) -> Found:
    """What a file has: each is read once."""
    text = path.read_text()
    known = Found(len(text.splitlines()))
    for node in statements(ast.parse(text)):
        match node:
            case ast.Import():
                known.imports += [(alias.name, node.lineno) for alias in node.names]
            case ast.ImportFrom(module=str() as module):
                names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
                known.imports += [(name, node.lineno) for name in names]
            case ast.Assign(targets=[ast.Tuple(), *_], value=ast.Tuple(elts=values)) if len(values) > 2:
                known.packed.append(node.lineno)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                parameters = sum(parameter.arg not in ("self", "cls") for parameter in given)
                length = (node.end_lineno or 0) - node.lineno + 1
                known.functions.append((node.name, node.lineno, length, parameters))
            case ast.ClassDef():
                known.classes.append((node.name, sum(isinstance(item, ast.AnnAssign) for item in node.body)))
        if isinstance(node, Documented):
            known.texts += [
                (item.value.value.strip(), item.lineno)
                for item in node.body
                if isinstance(item, ast.Expr)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, str)
            ]
    return known


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """A node and the statements in it, whose expressions have none."""
    yield node
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, part, ()):
            yield from statements(child)


def source() -> dict[str, Found]:
    """What the package's files have, by the names of their modules."""
    named = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        named[name.removesuffix(".__init__")] = found(path)
    return named


def test_no_file_is_too_long_to_be_read_at_once() -> None:
    lengths = {str(path.relative_to(ROOT)): found(path).lines for path in files()}
    assert {name: length for name, length in lengths.items() if length > FILE} == {}


def test_the_package_stays_small() -> None:
    native = [path for ending in ("cpp", "h") for path in SOURCE.rglob(f"*.{ending}")]
    lines = sum(item.lines for item in source().values()) + sum(len(path.read_text().splitlines()) for path in native)
    assert lines <= SOURCE_LINES


def test_no_function_is_longer_than_a_screen() -> None:
    long = {}
    for path in files():
        name = str(path.relative_to(ROOT))
        if "kernels" in path.parts:
            continue  # one launch is one function, whatever it has to do
        for function, _, length, _ in found(path).functions:
            if length > FUNCTION and (name, function) not in TABLES:
                long[f"{name}: {function}"] = length
    assert long == {}


def test_no_function_has_many_parameters() -> None:
    many = {
        f"{module}:{line} {name}": parameters
        for module, item in source().items()
        if not module.startswith("kvern.kernels")
        for name, line, _, parameters in item.functions
        if parameters > MOST_PARAMETERS
    }
    assert many == {}


def test_no_test_module_is_imported() -> None:
    """Helpers that several test modules need stand in `tests/support/`."""
    imported = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files()
        for name, line in found(path).imports
        if name.startswith("tests.") and any(part.startswith("test_") for part in name.split("."))
    ]
    assert imported == []


def test_imports_run_in_no_circle() -> None:
    """Imports within functions and for types alone count as others do."""
    modules = source()
    graph = {
        name: {other for other, _ in item.imports if other in modules and other != name}
        for name, item in modules.items()
    }
    sorter = graphlib.TopologicalSorter(graph)
    sorter.prepare()  # raises CycleError, which names the circle


def test_no_assignment_packs_several() -> None:
    assert [f"{name}:{line}" for name, item in source().items() for line in item.packed] == []


def test_docstrings_are_noun_phrases_or_sentences() -> None:
    fragments = [
        f"{name}:{line}" for name, item in source().items() for text, line in item.texts if FRAGMENT.match(text)
    ]
    assert len(fragments) < MOST_FRAGMENTS, fragments


def test_no_class_collects_fields() -> None:
    large = [
        f"{module}: {name}"
        for module, item in source().items()
        for name, fields in item.classes
        if fields > MOST_FIELDS and name not in OPTIONS
    ]
    assert large == []
