"""A new field of requests: three files declare it, read it from bodies, and use it in the sampler."""

import os
import subprocess
import sys
from pathlib import Path

import kvern

PACKAGE = Path(kvern.__file__).parent
EDITS = {
    "request/request.py": ("    priority: int = 0\n", "    priority: int = 0\n    certain: bool = False\n"),
    "api/fields.py": (
        'RequestOptions(priority=typed(body, "priority", int, 0))',
        'RequestOptions(priority=typed(body, "priority", int, 0), certain=typed(body, "certain", bool, False))',
    ),
    "device/rows.py": ("params.temperature,", "0.0 if request.spec.certain else params.temperature,"),
}
"""By file: a text and what stands in its place."""
PROGRAM = """
import asyncio, sys
from kvern.api.fields import read_common
from kvern.config import EngineConfig
from kvern.request.sampling_params import SamplingParams
from kvern.serving.client import EngineClient

async def main():
    async with EngineClient(EngineConfig(sys.argv[1], threads=1, max_model_len=64)) as client:
        async def answer(body, temperature):
            news = asyncio.Event()
            params = SamplingParams(temperature=temperature, seed=7, max_tokens=20, ignore_eos=True)
            options = read_common(body).options
            generation = await client.replicas.submit([5, 6, 7], params, options, news=news)
            async for _ in client.replicas.follow([generation], news):
                pass
            return generation.output.outputs[0].token_ids
        greedy = await answer({}, 0.0)
        assert await answer({}, 9.0) != greedy
        assert await answer({"certain": True}, 9.0) == greedy
asyncio.run(main())
"""


def edited_package(folder: Path) -> None:
    """A copy of the package in a folder: links, but for the files of EDITS."""
    copy = folder / "kvern"
    copy.mkdir()
    edited = {Path(name).parts[0] for name in EDITS}
    for entry in PACKAGE.iterdir():
        if entry.name in edited:
            (copy / entry.name).mkdir()
            for file in entry.iterdir():
                (copy / entry.name / file.name).symlink_to(file)
        else:
            (copy / entry.name).symlink_to(entry)
    for name, (old, new) in EDITS.items():
        text = (PACKAGE / name).read_text()
        assert text.count(old) == 1, name
        (copy / name).unlink()
        (copy / name).write_text(text.replace(old, new))


def test_a_field_reaches_the_sampler_by_three_files(tiny_model: Path, tmp_path: Path) -> None:
    assert len(EDITS) == 3
    edited_package(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tiny_model)], env=environment, cwd=tmp_path, timeout=240)
    assert done.returncode == 0
