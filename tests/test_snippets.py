"""Every Python snippet of README, docs and examples is run, and prints what the page says that it prints.

A block of ```python is run, after the blocks before it on the page; one of ```py is a fragment. A plain block right
after it is its output.
"""

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvern import LLM
from tests.support.encoders import make_encoder
from tests.support.peft_adapters import make_adapter
from tests.support.processors import install_example, installed_package
from tests.support.served import Served, serving

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```\n(?P<output>.*?)^```)?", re.DOTALL | re.MULTILINE)
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if BLOCK.search(page.read_text())]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("--threads", "1", "--data-dir", str(tmp_path_factory.mktemp("data"))) as server:
        yield server


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed_package(install_example(tmp_path_factory.mktemp("example"))):
        yield


@pytest.fixture(scope="module")
def names(served: Served, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands in a snippet for something that this machine has elsewhere."""
    folder = tmp_path_factory.mktemp("snippets")
    adapters = {name: make_adapter(tiny_model, folder / name, index, r=4) for index, name in enumerate(("a", "b", "c"))}
    (folder / "requests.jsonl").write_bytes((ROOT / "examples" / "requests.jsonl").read_bytes())
    return {
        "127.0.0.1:8000": f"{served.host}:{served.port}",
        "/NAME": "/kvern-12m",
        '"NAME"': '"kvern-12m"',
        "organisation/model": str(tiny_model),
        "/models/sql-adapter": str(adapters["a"]),
        "/models/legal-adapter": str(adapters["b"]),
        "/models/another": str(adapters["c"]),
        "cross-encoder/ms-marco-MiniLM-L6-v2": str(make_encoder("bert", folder / "encoder", labels=1)),
        '"requests.jsonl"': repr(str(folder / "requests.jsonl")),
    }


@pytest.mark.sample(3)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_prints_what_it_says(page: Path, names: dict[str, str], example: None) -> None:
    space: dict[str, object] = {}
    for block in BLOCK.finditer(page.read_text()):
        code = block["code"]
        for name, here in names.items():
            code = code.replace(name, here)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"{page.name}", "exec"), space)
        if block["output"] is not None:
            assert printed.getvalue() == block["output"]
    for value in space.values():
        if isinstance(value, LLM):
            value.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_answers_well(example: Path) -> None:
    """No line that names an answer is empty."""
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.rstrip("\n").splitlines()
    assert lines and not any(line.endswith(("-> ''", "? ")) for line in lines)
    for expected in EXPECTED[example.stem]:
        assert re.search(expected, done.stdout), done.stdout


EXPECTED = {
    "async_stream": [r"block table", r"925", r"\w+\."],
    "chat": [r'"name": "John Weaver"', r'get_weather {"city": "Lisbon"}', r"24 degrees"],
    "generate": [r"'Once upon a time' -> '.{40}", r"(?m)^2 ."],
    "stream": [r"\w+\.\n"],
}
