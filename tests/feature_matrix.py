"""The page that says which tests combine which features: `python -m tests.feature_matrix > docs/features.md`.

It holds what pytest collects: tests with the mark `features`, unless they are marked to be skipped or to fail.
"""

import contextlib
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.test_feature_matrix import FEATURES

ROOT = Path(__file__).parents[1]
UNSURE = {"skip", "skipif", "xfail"}

HEAD = """# Features together

A request may ask for any of these at once, and any mixture of requests shares one batch. This page is made from the
tests (`python -m tests.feature_matrix > docs/features.md`), and a test fails if it is not current or a cell is empty. A
cell is the number of tests whose requests use both features; on the diagonal, the one.

"""
PROMISES = """
## What is checked

In `tests/test_feature_matrix.py` every request, in a batch with others, gets the answers that it gets alone, at once,
from an engine with room and without a prefix cache. On top of that:

"""


class Collector:
    """Notes the tests that pytest finds, by the features that they combine."""

    def __init__(self) -> None:
        self.tests: dict[str, frozenset[str]] = {}

    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            marks = {mark.name: mark for mark in item.iter_markers()}
            if "features" in marks and not UNSURE & set(marks):
                self.tests[item.nodeid] = features = frozenset(marks["features"].args)
                if not features or not features <= set(FEATURES):
                    raise pytest.UsageError(f"{item.nodeid} is marked with {sorted(features)}: name known features")


def collect() -> dict[str, frozenset[str]]:
    """The features of every marked test, by its id."""
    files = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.features" in path.read_text()]
    collector, said = Collector(), io.StringIO()
    with contextlib.redirect_stdout(said):
        status = pytest.main(
            ["--collect-only", "-q", "--rootdir", str(ROOT), "-p", "no:cacheprovider", *map(str, files)], [collector]
        )
    if status:
        raise SystemExit(f"the tests cannot be collected:\n{said.getvalue()}")
    return collector.tests


def page(tests: Mapping[str, frozenset[str]]) -> str:
    """The page, in Markdown. Raises SystemExit if no test covers some pair."""
    names = list(FEATURES)
    rows = [[f"**{name}**", *(cell(name, other, tests) for other in names)] for name in names]
    promises = [[f"**{name}**", " ".join((feature.__doc__ or "").split())] for name, feature in FEATURES.items()]
    few, more = [], []
    for pair in itertools.combinations_with_replacement(names, 2):
        own = [linked(test) for test, features in tests.items() if features == set(pair)]
        few.append([f'<a id="{anchor(*pair)}"></a>{written(set(pair))}', "<br>".join(own)])
    for test, features in tests.items():
        if len(features) > 2:
            more.append([written(features), linked(test)])
    sections = (
        HEAD,
        table(["", *names], rows),
        PROMISES,
        table(["", "promise"], promises),
        "\n## Tests of one and two\n\n",
        table(["features", "test"], few),
        "\n## Tests of three and more\n\n",
        table(["features", "test"], more),
    )
    return "".join(sections)


def cell(name: str, other: str, tests: Mapping[str, frozenset[str]]) -> str:
    """How many tests combine two features."""
    pair = sorted((name, other), key=list(FEATURES).index)
    count = sum(features.issuperset(pair) for features in tests.values())
    if not count:
        raise SystemExit(f"no test combines {name} and {other}")
    return f"[{count}](#{anchor(*pair)})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def written(features: set[str] | frozenset[str]) -> str:
    return ", ".join(name for name in FEATURES if name in features)


def anchor(*names: str) -> str:
    return "-".join(name.replace(" ", "-").lower() for name in dict.fromkeys(names))


def linked(test: str) -> str:
    file, _, name = test.partition("::")
    return f"[`{name}`](../{file})"


if __name__ == "__main__":
    print(page(collect()), end="")
