"""The page that says which tests combine which features: `python -m tests.support.feature_matrix > docs/features.md`.

It holds what pytest collects: tests with the mark `features`, unless they are marked to be skipped or to fail.
"""

import contextlib
import io
import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNSURE = {"skip", "skipif", "xfail"}

HEAD = """# Features together

A request may ask for any of these at once, and any mixture of requests shares one batch. This page is made from the
tests (`python -m tests.support.feature_matrix > docs/features.md`), and a test fails if it is not current or a cell is
empty. A cell is the number of tests whose requests use both features; on the diagonal, the one. What goes with a model
that is divided is [below](#several-ranks).

"""
PROMISES = """
## What is checked

In `tests/models/test_feature_matrix.py` every request, in a batch with others, gets the answers that it gets alone, at
once, from an engine with room and without a prefix cache. `test_two_features_of_other_models` and
`test_everything_at_once_of_other_models` there say the same of tiny random models with states (`qwen3_5`), with sinks
and windows (`gpt_oss`) and with latents (`deepseek_v3`): of some pairs in `make test`, of all nightly. Which options of
an engine such a model refuses, by name, is tested beside. On top of that:

"""
MORE = """
## Tests of three and more

Those of ten and more answer one batch of requests with seven or eight features each; every two meet in one request.

"""
SEVERAL = """
## Several ranks

What goes with each division of a model ([several ranks](parallel.md)): `tp` is `-tp`, `pp` is `-pp`, `dp` is `-dp`, and
`ep` is `-tp` with `--enable-expert-parallel`, of a mixture of experts, and `own rows` that with
`--enable-dp-attention`. Two processes each, or four, on CPUs. A cell is the number of tests. What DP attention
and pipeline stages refuse is in [several ranks](parallel.md). In `tests/ranks/test_rank_features.py` every request gets
the answers of one process, beside others, in an engine with too little room and a prefix cache. Features are checked by
what they promise. Of engines are:

"""


class Collector:
    """Notes the tests that pytest finds, by the features that they combine."""

    def __init__(self) -> None:
        self.tests: dict[str, frozenset[str]] = {}

    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            marks = {mark.name: mark for mark in item.iter_markers()}
            if "features" in marks and not UNSURE & set(marks):
                self.tests[item.nodeid] = frozenset(marks["features"].args)


def collect() -> Collector:
    """The features of every marked test."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.features" in path.read_text()]
    collector, said = Collector(), io.StringIO()
    with contextlib.redirect_stdout(said):
        status = pytest.main(
            ["--collect-only", "-q", "--rootdir", str(ROOT), "-p", "no:cacheprovider", *map(str, files)], [collector]
        )
    if status:
        raise SystemExit(f"the tests cannot be collected:\n{said.getvalue()}")
    return collector


def page(tests: Mapping[str, frozenset[str]], promises: Mapping[str, str], beside: Collection[str] = ()) -> str:
    """The page, in Markdown: the features of each test, and what each feature promises.

    Tests may have features `beside` those. Raises SystemExit if a test names another, or if none covers some pair.
    """
    names, known = list(promises), [*promises, *beside]
    for test, features in tests.items():
        if not features or not features.issubset(known):
            raise SystemExit(f"{test} is marked with {sorted(features)}: features are {', '.join(known)}")

    few = []
    for pair in itertools.combinations_with_replacement(names, 2):
        ordered = list(dict.fromkeys(pair))
        own = [linked(test) for test, features in tests.items() if features == set(pair)]
        few.append([f'<a id="{anchor(ordered)}"></a>{", ".join(ordered)}', "<br>".join(own)])
    more = [
        [", ".join(sorted(features, key=known.index)), linked(test)]
        for test, features in tests.items()
        if len(features) > 2
    ]
    matrix = [[f"**{name}**", *(cell({name, other}, tests, names) for other in names)] for name in names]
    sections = (
        HEAD,
        table(["", *names], matrix),
        PROMISES,
        table(["", "promise"], [[f"**{name}**", promise] for name, promise in promises.items()]),
        "\n## Tests of one and two\n\n",
        table(["features", "test"], few),
        MORE,
        table(["features", "test"], more),
    )
    return "".join(sections)


def several_ranks(tests: Mapping[str, frozenset[str]], rows: Mapping[str, str], divisions: Sequence[str]) -> str:
    """The part of the page on models that are divided: of each feature of `rows`, with what those of engines promise.

    Raises SystemExit if a feature is not tried with a division.
    """
    matrix, each = [], []
    for row in rows:
        matrix.append([f"**{row}**"])
        for division in divisions:
            both = [row, division]
            matrix[-1].append(cell({*both}, tests, both))
            own = [linked(test) for test, features in tests.items() if features == {*both}]
            each.append([f'<a id="{anchor(both)}"></a>{row}, {division}', "<br>".join(own)])
    promised = [[f"**{row}**", promise] for row, promise in rows.items() if promise]
    sections = table(["", "promise"], promised), table(["", *divisions], matrix), table(["", "test"], each)
    return SEVERAL + "\n".join(sections)


def cell(features: set[str], tests: Mapping[str, frozenset[str]], names: Sequence[str]) -> str:
    """How many tests combine these features."""
    ordered = sorted(features, key=names.index)
    count = sum(theirs >= features for theirs in tests.values())
    if not count:
        raise SystemExit(f"no test combines {' and '.join(ordered)}")
    return f"[{count}](#{anchor(ordered)})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def anchor(names: Sequence[str]) -> str:
    return "-".join(name.replace(" ", "-").lower() for name in names)


def linked(test: str) -> str:
    file, _, name = test.partition("::")
    return f"[`{name}`](../{file})"


def main() -> None:
    found = collect()
    # Only now: what pytest imports itself must not be there before.
    from tests.support.combined_features import PROMISED
    from tests.support.rank_features import DIVISIONS, OF_ENGINES

    beside = {name: of_engine.promise for name, of_engine in OF_ENGINES.items()}
    print(page(found.tests, PROMISED, [*beside, *DIVISIONS]), end="")
    print(several_ranks(found.tests, dict.fromkeys(PROMISED, "") | beside, [*DIVISIONS]), end="")


if __name__ == "__main__":
    main()
