"""Workloads that are the same everywhere, and the commands that measure them."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from kvern import EngineConfig
from kvern.bench.offline import check, run_once, shown_config
from kvern.bench.percentile import percentile
from kvern.bench.profile import part_of
from kvern.bench.record import read_record
from kvern.bench.workloads import SUITES, WORKLOADS, Workload, resolve
from kvern.cli.main import main
from kvern.engine.engine import Engine
from kvern.errors import ConfigError
from tests.support.families import make_checkpoint

CHECKSUMS = {
    "decode1": "8f4d511b7cae7da0",
    "decode64": "4dfeea4d00c94db7",
    "mixed256": "05c1ff68128dd153",
    "prefill64x4096": "fc12334a39d1a9fd",
    "shared2048x256": "a5ec60f28ec06c14",
}
"""Of the prompts and lengths for a vocabulary of 128256: other engines are measured on the same ones."""


@pytest.mark.parametrize("name", list(CHECKSUMS))
def test_workloads_are_the_same_everywhere(name: str) -> None:
    (workload,) = resolve((name,), 128256)
    text = json.dumps([workload.prompts, workload.lengths])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == CHECKSUMS[name]


def test_suites_name_workloads() -> None:
    assert {name for suite in SUITES.values() for name in suite} <= set(WORKLOADS)
    assert [workload.name for workload in resolve(("small",), 300)] == list(SUITES["small"])


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("decod8", None, "did you mean decode8"),
        ("absent.jsonl", None, "cannot be read"),
        ("empty.jsonl", "\n", "has no requests"),
        ("broken.jsonl", '{"prompt_token_ids": [1], "max_tokens": 2}\nnonsense\n', "line 2"),
        ("high.jsonl", '{"prompt_token_ids": [999], "max_tokens": 2}\n', "line 1"),
        ("zero.jsonl", '{"prompt_token_ids": [9], "max_tokens": 0}\n', "line 1"),
    ],
)
def test_bad_workloads_are_refused(tmp_path: Path, name: str, text: str | None, reason: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        resolve((str(path) if name.endswith("jsonl") else name,), 300)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(EngineConfig(model="kvern-1m", device="cpu", threads=1, max_model_len=128))


def test_repeated_runs_find_nothing_cached(engine: Engine) -> None:
    workload = Workload("two", [[300 + index for index in range(40)]] * 2, [4, 6])
    runs = [run_once(engine, workload, 0.6) for _ in range(3)]
    assert len({run.prefix_cache_hit_rate for run in runs}) == 1
    assert all(len(run.first_token) == 2 and len(run.between_tokens) == 8 for run in runs)
    engine.core.scheduler.check_integrity()


def test_a_workload_that_does_not_fit_is_refused_with_the_numbers(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="129 tokens, above max_model_len 128"):
        check(Workload("long", [[1] * 100], [29]), engine)


def test_percentiles() -> None:
    values = [float(value) for value in range(101, 0, -1)]
    assert [percentile(values, percent) for percent in (50, 99, 100, 99.5)] == [51, 100, 101, 100.5]
    assert percentile([], 50) == 0


def test_bench_offline_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "work.jsonl", tmp_path / "result.json"
    source.write_text('{"prompt_token_ids": [300, 301, 302], "max_tokens": 5}\n' * 3)
    command = ["bench", "offline", "--model", "kvern-1m", "--device", "cpu", "--workload", str(source)]
    assert main([*command, "--repeat", "2", "--warmup", "0", "--json", str(target)]) == 0
    assert "work" in capsys.readouterr().out
    record = read_record(target)
    assert (record.benchmark, record.model, record.software.torch) == ("offline", "kvern-1m", torch.__version__)
    assert record.options and record.options["model"] == "kvern-1m" and record.plan and record.plan["device"] == "cpu"
    assert "gpus" not in record.plan and record.plan["kernels"] == sorted(record.plan["kernels"])
    (case,) = record.cases
    assert case.details["predicted_seconds"] > 0 and case.workload["generated_tokens"] == 15
    seconds = case.figures["seconds"]
    assert len(seconds.runs) == 2 and seconds.spread == (min(seconds.runs), max(seconds.runs))
    assert seconds.median == pytest.approx(sum(seconds.runs) / 2)
    assert {"ttft_p99_milliseconds", "itl_p50_milliseconds", "step_milliseconds"} <= set(case.figures)
    assert main([*command, "--json", str(tmp_path / "absent" / "result.json")]) == 2
    assert "must be a folder, or a file in a folder that exists" in capsys.readouterr().err
    assert main(["bench", "offline", "--workload", "nothing"]) == 2
    assert main(["bench", "offline", "--repeat", "0"]) == 2


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_ranks_with_rows_of_their_own_are_measured_without_a_prefix_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, asked = make_checkpoint("mixtral", tmp_path), tmp_path / "asked.jsonl"
    asked.write_text("".join(f'{{"prompt_token_ids": [{row + 4}, 7, 9], "max_tokens": 5}}\n' for row in range(4)))
    options = ["--tensor-parallel-size", "2", "--enable-dp-attention", "--threads", "2", "--max-model-len", "64"]
    command = ["bench", "offline", "--model", str(folder), "--workload", str(asked), "--repeat", "1", *options]
    command += ["--device", "cpu"]
    assert main(command) == 2
    assert "keep prefixes from run to run: give --no-prefix-cache" in capsys.readouterr().err
    assert main([*command, "--no-prefix-cache", "--json", str(tmp_path / "found.json")]) == 0
    (found,) = read_record(tmp_path / "found.json").cases
    assert found.workload["generated_tokens"] == 20 and found.figures["seconds"].median > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_kernels_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels"]) == 2
    assert "without CUDA" in capsys.readouterr().err


def test_profile_names_the_parts_and_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    command = ["profile", "--model", "kvern-1m", "--device", "cpu", "--workload", "decode1", "--steps", "3"]
    assert main([*command, "--output", str(trace), "--json", str(tmp_path / "profile.json")]) == 0
    shown = capsys.readouterr().out
    assert "attention" in shown
    assert "linear" in shown
    assert json.loads(trace.read_text())["traceEvents"]
    (case,) = read_record(tmp_path / "profile.json").cases
    assert case.figures["step_milliseconds"].median > 0 and "linear_milliseconds" in case.figures


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("_decode_attention_kernel", "attention"),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "linear"),
        ("_matvec_kernel", "linear"),
        ("_rms_norm_kernel", "norm"),
        ("_rotate_and_store_kernel", "rotation and cache write"),
        ("_gated_activation_kernel", "activation"),
        ("_direct_gate_up_kernel", "experts"),
        ("_sample_chunk_kernel", "sampling"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("something", "other"),
    ],
)
def test_kernels_belong_to_parts(kernel: str, part: str) -> None:
    assert part_of(kernel) == part


def test_records_of_options_have_no_passwords() -> None:
    shown = json.dumps(shown_config(EngineConfig(kv_tier=("host:1GB", "valkey://kvern:secret@127.0.0.1:6379"))))
    assert "valkey://kvern:***@127.0.0.1:6379" in shown and "secret" not in shown
