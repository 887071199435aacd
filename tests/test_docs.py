"""Pages of documentation: their links lead somewhere, and they stay short."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from benchmarks.figures import Passage, filled

from kvern.models.registry import FAMILIES

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
LINK = re.compile(r"(?<!`)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LIMITS = {"ARCHITECTURE.md": 4000, "PERFORMANCE.md": 2500}
ALL_PAGES = 44_984


def anchors(page: Path) -> set[str]:
    """The anchors that a page offers: those of its headings, as GitHub makes them, and those it names itself."""
    text = FENCE.sub("", page.read_text())
    found = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        repeated = sum(re.fullmatch(re.escape(anchor) + r"(-\d+)?", known) is not None for known in found)
        found.add(f"{anchor}-{repeated}" if repeated else anchor)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            lost.append(link)
    assert not lost


def test_a_lost_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One word\n\n[here](#one-word) [`a`](#two)\n")
    assert anchors(page) == {"one-word"}
    assert LINK.findall(page.read_text()) == ["#one-word", "#two"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_pages_name_exist(page: Path) -> None:
    """Paths in backquotes, as `cache/manager.py` below src/kvern, `tests/...`, `benchmarks/...` or `docs/...`."""
    if page.name == "CHANGELOG.md":
        return  # it tells what was, too
    named = re.findall(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|cpp|h))`", FENCE.sub("", page.read_text()))
    places = (ROOT, ROOT / "src/kvern", ROOT / "benchmarks", ROOT / "docs")
    lost = [name for name in named if "NAME" not in name and not any((place / name).exists() for place in places)]
    assert not lost


def test_a_figure_that_is_no_longer_that_of_its_record_is_mended() -> None:
    passage = Passage("page.md", "| one | {} ms | {} % |", ["4.11", "39 424"])
    page = "| head |\n| one | 3.9 ms | 1,234.5-2 % |\n| two | 3.9 ms | 1 % |\n"
    assert filled(page, passage) == "| head |\n| one | 4.11 ms | 39 424 % |\n| two | 3.9 ms | 1 % |\n"
    for lost in ("| one | some ms | 1 % |", page + page):
        with pytest.raises(SystemExit, match=r"docs/page.md has [02] times what"):
            filled(lost, passage)


def test_versions_and_counts_that_pages_name_are_true() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    [bounds] = [found for item in dependencies if (found := re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", item))]
    oldest, newest = int(bounds[1]), int(bounds[2]) - 1
    assert f"PyTorch 2.{oldest} to 2.{newest} may be installed" in (ROOT / "docs/gpu.md").read_text()
    assert f"`{bounds[0]}`" in (ROOT / "CHANGELOG.md").read_text()
    constraints = (ROOT / "constraints.txt").read_text()
    assert f"of torch 2.{oldest} to 2.{newest}." in constraints
    [tested] = re.findall(r"^torch==(.+)$", constraints, re.MULTILINE)
    assert f"TORCH := torch=={tested}\n" in (ROOT / "Makefile").read_text()
    types = [name for name in FAMILIES.names if not name[0].isupper()]  # the others are names of architectures
    assert f"[{len(types)} model types](docs/models.md)" in (ROOT / "README.md").read_text()


def test_the_performance_tables_are_current() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.performance", "--check"], cwd=ROOT, stderr=subprocess.PIPE)
    assert not done.returncode, done.stderr


def test_the_hand_overs_of_a_prompt_are_where_the_page_says() -> None:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    rows = re.findall(r"^ *(\d+)  (\S+(?:, \S+)?) +(\S+\.py) ", text, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1)) and len(rows) > 20
    assert f"These are {len(rows)} hand-overs" in text
    for _, names, path in rows:
        source = (ROOT / "src/kvern" / path).read_text()
        for name in re.split(r"[., ]+", names):
            assert re.search(rf"(class|def) {name}\b", source) or name == "forward", f"{path} has no {name}"


def test_pages_stay_short() -> None:
    words = {page.name: len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")}
    assert {name: words[name] for name, limit in LIMITS.items() if words[name] > limit} == {}
    assert sum(words.values()) <= ALL_PAGES
