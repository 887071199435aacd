"""Decodes on a CPU that are captured: nobody sees anything of them but the speed."""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.cpu import capture
from kvern.cpu.capture import Buffer, Uncapturable, place
from kvern.request.step import ScheduledTokens
from kvern.runner.captured_decodes import ALIKE, ALIKE_FROM, SELDOM, CapturedDecodes
from tests.support.cache_folder import cache_folder, load_kernels, pretend_tiles
from tests.support.families import make_checkpoint
from tests.support.gguf_files import WITHOUT_TOKENIZER, write_gguf
from tests.support.head_drafting import drafting
from tests.support.internals import decoder_of, runner_of
from tests.support.speculation import speculating

PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=1.1, top_p=0.9, top_k=20, seed=4, max_tokens=15, ignore_eos=True, n=2),
    SamplingParams(presence_penalty=0.7, logit_bias={7: 2.0}, seed=5, max_tokens=14, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, xtc_probability=0.5, xtc_threshold=0.05, seed=6, max_tokens=9, ignore_eos=True),
]
PROMPTS = [[5, 6, 7], [8], [9, 10], list(range(20, 70)), [3, 4]]
SCALES = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.5}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    load_kernels("cpu_sampling", 1)
    pretend_tiles(monkeypatch, there=False)


class Steps:
    """Counts the steps of all engines that are captured, and those that are not where it lets none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lets, self.captured = True, 0
        for name in ("decode", "score"):
            monkeypatch.setattr(CapturedDecodes, name, self._counted(getattr(CapturedDecodes, name)))

    def _counted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(decodes: CapturedDecodes, scheduled: Sequence[ScheduledTokens]) -> Any:
            found = run(decodes, scheduled) if self.lets else None
            self.captured += found is not None
            return found

        return counted


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def answers(llm: LLM) -> Any:
    outputs = llm.generate(PROMPTS, PARAMS)
    return [[(part.token_ids, part.logprobs) for part in output.outputs] for output in outputs]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("family", "options", "changes"),
    [
        ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "int8", "max_batch_tokens": 16}, {}),
        ("gemma2", {"dtype": "float32"}, {}),
        ("granite", {"dtype": "bfloat16"}, SCALES),
        ("olmo2", {"dtype": "bfloat16", "quantization": "int8"}, {}),
        ("cohere", {"dtype": "float32", "kv_cache_tokens": 96, "block_size": 4}, {}),
        ("gpt_neox", {"dtype": "bfloat16", "quantization": "int4"}, {}),
        ("llama3", {"dtype": "bfloat16", "quantization": "int4", "head_quantization": "int8"}, {}),
        ("gemma4", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, {}),
        ("gemma4_vision", {"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "int8"}, {}),
    ],
)
def test_answers_are_those_of_steps_that_are_not(
    family: str, options: dict[str, Any], changes: dict[str, Any], steps: Steps, tmp_path: Path
) -> None:
    """In batches that grow and shrink, of requests that ask for what PyTorch or the host does between."""
    folder = make_checkpoint(family, tmp_path, **changes)
    with LLM(str(folder), threads=1, **options) as llm:
        found = [answers(llm) for _ in range(2)]
        assert steps.captured > 20
        steps.lets, steps.captured = False, 0
        assert found == [answers(llm)] * 2
        assert steps.captured == 0


def test_steps_of_many_sizes_share_programs_until_they_come_often(tmp_path: Path) -> None:
    """What is verified is as many tokens as happen to be guessed, and each program takes a while to capture."""
    folder = make_checkpoint("llama", tmp_path, vocab_size=288)
    asked = [SamplingParams(temperature=t, seed=9, max_tokens=30, ignore_eos=True) for t in (0, 1) for _ in range(4)]
    prompts = [[5, 6, 7 + index] for index in range(len(asked))]
    with LLM(str(folder), threads=1, dtype="float32", max_batch_requests=8) as llm:
        outputs = llm.generate(prompts, asked)
        captured = runner_of(llm)._captured
        with speculating(llm, outputs):
            again = llm.generate(prompts, asked)
            assert [one.outputs[0].token_ids for one in again] == [one.outputs[0].token_ids for one in outputs]
        assert len(captured._visits) > 6 and all(size % ALIKE == 0 for size in captured._sizes if size > ALIKE_FROM)
        often = next(iter(captured._visits))
        captured._visits[often] = SELDOM
        assert captured._padded(often) == often


def test_files_whose_parts_are_quantized_in_different_ways(steps: Steps, tmp_path: Path) -> None:
    """As published GGUF files are: queries and keys in other blocks than values, embeddings that no kernel reads."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
    model = make_checkpoint("llama", tmp_path / "model", tie_word_embeddings=False, **sizes)
    made = write_gguf(
        model, tmp_path, lambda name: "Q6_K" if re.search("attn_v|ffn_down|output|embd", name) else "Q4_K"
    )
    options = {"tokenizer": WITHOUT_TOKENIZER, "cache_dir": cache_folder(tmp_path / "cache")}
    with LLM(str(made.file), threads=1, dtype="bfloat16", **options) as llm:
        found = answers(llm)
        assert steps.captured > 10
        steps.lets = False
        assert found == answers(llm)


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvern")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "not captured" in record.getMessage()]


def test_what_pytorch_computes_is_not_captured(steps: Steps, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path)
    with LLM(str(folder), threads=1, dtype="bfloat16") as llm:
        assert answers(llm) == answers(llm)
    assert steps.captured == 0
    (warning,) = warnings(caplog)
    assert warning.startswith("decodes are not captured") and "PyTorch computes" in warning


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN packs no bfloat16 here")
def test_weights_that_onednn_has_packed_are_not_captured(
    steps: Steps, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which have no memory that PyTorch knows of."""
    pretend_tiles(monkeypatch, there=True)
    folder = make_checkpoint("llama", tmp_path)
    with LLM(str(folder), threads=1, dtype="bfloat16", max_batch_requests=1) as llm:
        assert "PackedMethod" in repr(decoder_of(llm))
        found = answers(llm)
        steps.lets = False
        assert found == answers(llm)
    assert steps.captured == 0
    (warning,) = warnings(caplog)
    assert "PyTorch computes _linear_pointwise" in warning


@pytest.mark.parametrize(
    ("captures", "error"),
    [(0, NotImplementedError("no storage\nof it")), (2, MemoryError()), (1, Uncapturable("it computes"))],
)
def test_whatever_a_capture_meets_the_step_runs_uncaptured(
    captures: int, error: Exception, steps: Steps, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its own sizes before, too; what was computed until then, and written into rows and cache, changes no answer."""
    folder, left = make_checkpoint("llama", tmp_path, vocab_size=288), captures

    def placed(buffers: Sequence[Buffer]) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise error
        return place(buffers)

    params = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for tokens in range(8, 18, 2)]
    monkeypatch.setattr(capture, "place", placed)
    with LLM(str(folder), threads=1, dtype="bfloat16", kv_cache_dtype="int8") as llm:
        outputs = llm.generate(PROMPTS, params)
        runner = runner_of(llm)
        assert not runner._captured._sizes and left == -1, "it is not tried again, and nothing is kept of it"
        with speculating(llm, outputs):
            again = llm.generate(PROMPTS, params)
        steps.lets = False
        expected = llm.generate(PROMPTS, params)
    for one, other, third in zip(outputs, again, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids == third.outputs[0].token_ids
    assert (steps.captured > 0) == (captures > 0)
    (warning,) = warnings(caplog)
    assert (str(error).splitlines() or ["MemoryError"])[0] in warning and "\n" not in warning


def test_draft_models_go_on_uncaptured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("llama", tmp_path, vocab_size=288)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    options = {"threads": 1, "dtype": "float32", "draft_model": str(folder)}
    with LLM(str(folder), **options) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    assert not warnings(caplog)
    monkeypatch.setattr(capture, "place", lambda buffers: 1 // 0)
    with LLM(str(folder), **options) as llm, drafting(llm, 2) as drafts:
        found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
        assert drafts
    assert found == expected
    assert sorted(warning.partition(" are ")[0] for warning in warnings(caplog)) == [
        "decodes", "decodes of the draft model"
    ]  # fmt: skip


@pytest.mark.nightly
def test_starts_import_no_compiler() -> None:
    """What PyTorch offers to watch its own operations with brings one, which takes seconds."""
    program = (
        "import sys; from kvern import LLM, SamplingParams\n"
        "LLM('kvern-1m', threads=1).generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split()[-1:] == ["False"], done.stderr[-2000:]
