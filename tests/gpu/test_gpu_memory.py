"""A GPU with too little memory, or a kernel that does not work there: less is taken, said or done, and nothing ends.

Run with `pytest -m gpu`.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.kernels.recording import Launch
from tests.support.gpu_engines import GREEDY, SMALL, held_out
from tests.support.internals import check_integrity, core_of, engine_of
from tests.support.outputs import token_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def test_a_step_that_runs_out_of_memory_is_run_in_parts(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(device="cuda", dtype="bfloat16", max_model_len=1024, kv_cache_tokens=65536, max_batch_tokens=16384)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    prompts = [[5 + index] * 1000 for index in range(16)]
    before = token_ids(llm.generate(prompts, params))
    core_of(llm).scheduler.cache.tree.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    hoard = torch.empty(free - (56 << 20), dtype=torch.uint8, device="cuda")
    try:
        found = token_ids(llm.generate(prompts, params))
    finally:
        del hoard
        torch.cuda.empty_cache()
    assert "out of GPU memory in a step of" in caplog.text
    # Products of fewer rows round differently in 16 bits: what counts is that every request went on.
    assert [[len(answer) for answer in answers] for answers in found] == [[3]] * 16
    assert sum(a == b for a, b in zip(found, before, strict=True)) >= 12
    check_integrity(llm)


@pytest.fixture
def half_taken() -> Iterator[None]:
    """Another process holds half of the card."""
    code = (
        "import torch; total = torch.cuda.mem_get_info()[1]\n"
        "held = torch.empty(total // 2, dtype=torch.uint8, device='cuda'); torch.cuda.synchronize()\n"
        "print('holding', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        yield
        process.stdin.write("\n")


def write_config(folder: Path, layers: int, hidden: int) -> Path:
    """A Llama of these sizes, without weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.usefixtures("half_taken")
def test_takes_less_of_a_card_that_others_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_config(tmp_path, layers=16, hidden=1024)
    llm = LLM(str(folder), device="cuda", load_format="dummy")
    assert "others hold" in caplog.text
    plan = engine_of(llm).layout
    total = torch.cuda.mem_get_info()[1]
    cache_bytes = plan.blocks * plan.block_size * plan.token_bytes
    assert 0.2 * total < cache_bytes < 0.5 * total
    outputs = llm.generate([[5] * 2000] * 32, SamplingParams(max_tokens=4, ignore_eos=True))
    assert all(len(output.outputs[0].token_ids) == 4 for output in outputs)
    del llm, outputs


def test_two_engines_share_a_card(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_config(tmp_path, layers=16, hidden=1024)
    total = torch.cuda.mem_get_info()[1]
    used_before = total - torch.cuda.mem_get_info()[0]
    engines = [LLM(str(folder), device="cuda", load_format="dummy", gpu_memory_share=0.4) for _ in range(2)]
    assert "others hold" not in caplog.text
    used = total - torch.cuda.mem_get_info()[0] - used_before
    caches = [plan.blocks * plan.block_size * plan.token_bytes for plan in (engine_of(llm).layout for llm in engines)]
    assert min(caches) > 0.25 * total, f"caches of {caches} bytes, of {total}"
    assert used < 0.8 * total + (1 << 30)
    for llm in engines:
        outputs = llm.generate([[5] * 2000] * 32, SamplingParams(max_tokens=4, ignore_eos=True))
        assert all(len(output.outputs[0].token_ids) == 4 for output in outputs)
    del llm, engines, outputs


def test_weights_that_do_not_fit_are_one_clear_line(tmp_path: Path) -> None:
    folder = write_config(tmp_path, layers=160, hidden=16384)
    done = subprocess.run(
        [sys.executable, "-m", "kvern", "bench", "offline", "--model", str(folder), "--load-format", "dummy"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    line = done.stderr
    assert "the weights take" in line and "GB free" in line and "billion parameters would fit" in line


def test_a_kernel_that_does_not_work_is_left_to_pytorch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = Launch.compile

    def compile_others(launch: Launch) -> object:
        if launch.group == "norm":
            raise RuntimeError("PTX JIT compilation failed")
        return compiled(launch)

    monkeypatch.setattr(Launch, "compile", compile_others)
    with caplog.at_level(logging.WARNING):
        llm = LLM(device="cuda", **SMALL)
    said = "the kernels for norm do not work here (_rms_norm_kernel), PyTorch does their work: PTX JIT compilation"
    assert said in caplog.text
    monkeypatch.undo()
    expected = LLM(device="cpu", dtype="float32", max_model_len=512).chat(held_out()[:20], GREEDY)
    assert token_ids(llm.chat(held_out()[:20], GREEDY)) == token_ids(expected)
