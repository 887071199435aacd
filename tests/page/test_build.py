"""The committed chat page: its size, its addresses, and that it is what its sources make."""

import gzip
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from playwright.sync_api import Page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "src/kvern/server/page"
WEB = ROOT / "web"
MOST = 250_000  # bytes, compressed


def test_the_page_is_small() -> None:
    sizes = {file.name: len(gzip.compress(file.read_bytes(), 9)) for file in PAGE.iterdir()}
    assert sum(sizes.values()) < MOST, sizes


def test_the_page_loads_nothing_from_outside() -> None:
    markup = (PAGE / "index.html").read_text()
    style = (PAGE / "page.css").read_text()
    assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", markup)
    assert "url(" not in style
    assert "@import" not in style


@pytest.mark.nightly
def test_the_browser_is_told_to_load_nothing_from_outside(page: Page) -> None:
    answer = page.reload()
    assert answer is not None
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self'; style-src 'self'; img-src 'self' data:;")
    assert "unsafe" not in policy


def test_licences_name_all_that_is_bundled() -> None:
    names = re.findall(r'"([\w.-]+)": "[\d.]+"', (WEB / "package.json").read_text().partition('"devDependencies"')[0])
    licences = (PAGE / "licences.txt").read_text()
    assert len(names) > 3
    assert [name for name in names if f"page.js contains {name} " not in licences] == []


def test_the_page_is_what_its_sources_make(tmp_path: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("there is no Node.js on this machine")
    if not (WEB / "node_modules/esbuild").exists():
        pytest.skip("web/node_modules is missing: run npm ci in web/")
    subprocess.run(["node", "build.mjs", str(tmp_path)], cwd=WEB, check=True, capture_output=True)
    built = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    committed = {file.name: file.read_bytes() for file in PAGE.iterdir()}
    assert built.keys() == committed.keys()
    changed = [name for name, content in built.items() if committed[name] != content]
    assert not changed, f"{changed} differ from a fresh build: run npm run build in web/"
