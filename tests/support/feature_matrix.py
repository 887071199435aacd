"""The page that says which tests combine which features: `python -m tests.support.feature_matrix > docs/features.md`.

It holds what pytest collects: tests with the mark `features`, unless they are marked to be skipped or to fail.
"""

import contextlib
import io
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNSURE = {"skip", "skipif", "xfail"}

HEAD = """# Features together

A request may have any of these features at once, and any mixture of requests shares one batch: {names}.
Tests combine every two of them. This page is made from the marks of these tests (`python -m
tests.support.feature_matrix > docs/features.md`). [Models](models.md#what-works-with-which-type) says what works with
which model type.
"""
PROMISES = """
## What the tests check

In a batch with others every request gets the answers that it gets alone, also with models with states, attention
sinks, windows and latent attention. In addition:

"""
SEVERAL = """
## Several ranks

Each of these features, and each below, is tried with each division of a model, in two or four processes on CPUs, with
the answers of one process: {divisions}. `tp`, `pp` and `dp` are the options of these names, `ep` is `-tp` with
`--enable-expert-parallel`, `DP attention` is that with `--enable-dp-attention`, `prefill + decode` is
`--prefill-engines 1 --decode-engines 1`. [Several GPUs](parallel.md#what-is-refused) says what each refuses.

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
    """The page, in Markdown: which features are combined, and what each promises.

    Tests may have features `beside` those. Raises SystemExit if a test names another, or if none covers some pair.
    """
    names, known = list(promises), [*promises, *beside]
    for test, features in tests.items():
        if not features or not features.issubset(known):
            raise SystemExit(f"{test} is marked with {sorted(features)}: features are {', '.join(known)}")
    for name in names:
        for other in names:
            check([name, other], tests, names)
    return HEAD.format(names=", ".join(names)) + PROMISES + table(["feature", "promise"], list(promises.items()))


def several_ranks(tests: Mapping[str, frozenset[str]], rows: Mapping[str, str], divisions: Sequence[str]) -> str:
    """The part of the page on models that are divided: each feature of `rows`, with what those of engines promise.

    Raises SystemExit if a feature is not tried with a division.
    """
    for row in rows:
        for division in divisions:
            check([row, division], tests, [row, *divisions])
    promised = table(["feature", "promise"], [[row, promise] for row, promise in rows.items() if promise])
    return SEVERAL.format(divisions=", ".join(divisions)) + promised


def check(features: Sequence[str], tests: Mapping[str, frozenset[str]], order: Sequence[str]) -> None:
    """Raises SystemExit, which names the features in this order, if no test combines them."""
    if not any(theirs.issuperset(features) for theirs in tests.values()):
        raise SystemExit(f"no test combines {' and '.join(sorted({*features}, key=order.index))}")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> None:
    found = collect()
    # Only now: what pytest imports itself must not be there before.
    from tests.support.combined_features import PROMISED
    from tests.support.rank_features import BETWEEN_STEPS, DIVISIONS, OF_ENGINES

    beside = {name: of_engine.promise for name, of_engine in OF_ENGINES.items()} | BETWEEN_STEPS
    print(page(found.tests, PROMISED, [*beside, *DIVISIONS]), end="")
    print(several_ranks(found.tests, dict.fromkeys(PROMISED, "") | beside, [*DIVISIONS]), end="")


if __name__ == "__main__":
    main()
