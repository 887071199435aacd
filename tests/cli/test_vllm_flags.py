"""Command lines that people know from vLLM, with kvern in vLLM's place."""

import shlex
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

from kvern.cli.main import SHARED, main, read_command
from kvern.cli.options import KINDS, read_defaults
from kvern.cli.run import RunCommand
from kvern.cli.serve import ServeCommand
from kvern.errors import ConfigError
from kvern.options.rules import Named, Switch
from kvern.options.vllm import VLLM
from tests.support.served import QUESTION, serving

MODEL = "kvern-1m"
FIRST_SERVER = (
    f"{MODEL} --dtype auto --api-key token-abc123 --gpu-memory-utilization 0.9 --max-model-len 2k --max-num-seqs 4 "
    "--tensor-parallel-size 1 --enable-prefix-caching --enable-auto-tool-choice --tool-call-parser hermes"
)
SECOND_SERVER = (
    f"--model={MODEL} --served-model-name a {MODEL} --enforce-eager --generation-config vllm --swap-space 4 "
    "--chat-template '{{ messages[0].content }}' --max_num_batched_tokens 256 --api-key token-abc123"
)


def parsed(line: str, **variables: str) -> tuple[ServeCommand, list[str]]:
    return read_command(shlex.split(line), variables)


def differences(command: ServeCommand) -> dict[str, Any]:
    """The options that are not the defaults."""
    usual = ServeCommand()
    return {
        name: value
        for given, default in ((command.engine, usual.engine), (command.server, usual.server))
        for name, value in vars(given).items()
        if value != getattr(default, name)
    } | ({"model": command.name} if command.name else {})


# As vLLM documents them. Only the command lines are read here, so what they name need not exist.
DOCUMENTED: list[tuple[str, dict[str, Any]]] = [
    ("serve Qwen/Qwen2.5-1.5B-Instruct", {"model": "Qwen/Qwen2.5-1.5B-Instruct"}),
    ("serve m --dtype auto --api-key token-abc123", {"model": "m", "api_key": ("token-abc123",)}),
    ("serve m --api-key a b", {"model": "m", "api_key": ("a", "b")}),
    ("serve --api-key=a m --api-key b --api-key=-c", {"model": "m", "api_key": ("a", "b", "-c")}),
    (
        "serve m --served-model-name [a] --port 1 --served-model-name b --port 2",
        {"served_model_name": ("[a]", "b"), "port": 2},
    ),
    ("serve m -cc.mode=3 -O.level=2", {}),
    ("serve --model m --host 0.0.0.0 --port 8080", {"model": "m", "host": "0.0.0.0", "port": 8080}),
    ("serve m --tensor-parallel-size 1 --pipeline-parallel-size=1 -dp 1", {"model": "m"}),
    ("serve m -dp 2 --data-parallel-size-local 2", {"model": "m", "data_parallel_size": 2}),
    ("serve m -tp 1 -q none", {"model": "m"}),
    ("serve m -tp=1 -O3", {"model": "m"}),
    ("serve m -tp 2", {"model": "m", "tensor_parallel_size": 2}),
    (
        "serve m -tp 2 --enable-expert-parallel --enable-eplb --num-redundant-experts 4",
        {
            "model": "m",
            "tensor_parallel_size": 2,
            "enable_expert_parallel": True,
            "rebalance_experts": "60s",
            "redundant_experts": 4,
        },
    ),
    ("serve m -pp 2", {"model": "m", "pipeline_parallel_size": 2}),
    ("serve m --tensor-parallel-size=4", {"model": "m", "tensor_parallel_size": 4}),
    ('serve m -sc \'{"method": "mtp", "num_speculative_tokens": 1}\'', {"model": "m", "draft_model": "mtp"}),
    ('serve m -sc \'{"method": "eagle3", "model": "h"}\'', {"model": "m", "draft_model": "h"}),
    ('serve m -sc \'{"method": "ngram", "prompt_lookup_max": 4}\'', {"model": "m", "proposer": "ngram"}),
    (
        "serve m --gpu-memory-utilization 0.95 --max-model-len 8192",
        {"model": "m", "gpu_memory_share": 0.95, "max_model_len": 8192},
    ),
    ("serve m --max_model_len 32k --max-num-batched-tokens 8K", {"max_model_len": 32000, "max_batch_tokens": 8192}),
    ("serve m --max-model-len 1M", {"max_model_len": 1 << 20}),
    ("serve m --max-model-len=-1 --max-num-seqs 64", {"max_batch_requests": 64}),
    ("serve m --max-model-len auto", {}),
    ("serve m --enable-prefix-caching --enable-chunked-prefill", {}),
    (
        "serve m --no-enable-prefix-caching --no-enable-chunked-prefill",
        {"prefix_cache": False, "chunked_prefill": False},
    ),
    ("serve m --enforce-eager --no-async-scheduling --seed 3", {"cuda_graphs": False, "overlap": False, "seed": 3}),
    ("serve --enforce-eager m --block-size 32", {"cuda_graphs": False, "block_size": 32}),
    ("serve m --enable-auto-tool-choice --tool-call-parser hermes", {"tool_parser": "hermes"}),
    (
        "serve m --tool-call-parser llama3_json --chat-template t.jinja",
        {"tool_parser": "llama", "chat_template": "t.jinja"},
    ),
    (
        "serve m --tool-call-parser llama4_pythonic --reasoning-parser deepseek_r1",
        {"tool_parser": "pythonic", "reasoning_parser": "think"},
    ),
    ("serve m --reasoning-parser qwen3 --enable-reasoning", {"reasoning_parser": "think"}),
    ("serve m --reasoning-parser seed_oss", {"reasoning_parser": "seed"}),
    (
        "serve m --enable-lora --lora-modules sql=/a math=/b --max-loras 2 --max-lora-rank 32 --max-cpu-loras 4",
        {"adapters": {"sql": "/a", "math": "/b"}, "max_adapters": 2, "max_adapter_rank": 32},
    ),
    ("""serve m --lora-modules '{"name": "sql", "path": "/a", "base_model_name": "m"}'""", {"adapters": {"sql": "/a"}}),
    (
        """serve m --hf-overrides '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}'""",
        {"hf_overrides": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}},
    ),
    (
        """serve m --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv-events"}'""",
        {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv-events"}},
    ),
    (
        """serve m --default-chat-template-kwargs '{"enable_thinking": false}'""",
        {"chat_template_kwargs": {"enable_thinking": False}},
    ),
    ("serve m --served-model-name a b", {"served_model_name": ("a", "b")}),
    (
        "serve m --ssl-keyfile k.pem --ssl-certfile c.pem --root-path /llm",
        {"tls_key": Path("k.pem"), "tls_cert": Path("c.pem"), "root_path": "/llm"},
    ),
    (
        """serve m --allowed-origins '["https://a.example", "https://b.example"]'""",
        {"allowed_origins": ("https://a.example", "https://b.example")},
    ),
    ("serve m --uvicorn-log-level warning --disable-log-requests --disable-log-stats", {}),
    ("serve m --enable-log-requests --max-log-len 100", {"log_requests": "summary"}),
    ("serve m --download-dir /d --load-format safetensors --revision main", {"download_dir": "/d", "revision": "main"}),
    ("serve m --load-format dummy --dtype float", {"load_format": "dummy", "dtype": "float32"}),
    ("serve m --swap-space 4 --cpu-offload-gb 0", {"kv_tier": ("host:4GiB?optional",)}),
    ("serve m --kv-offloading-size 2.5 --kv-offloading-backend native", {"kv_tier": ("host:2.5GiB?optional",)}),
    ("serve m --swap-space 0 --kv-offloading-size 0", {}),
    ("serve m --enable-hierarchical-cache", {"kv_tier": ("host?optional",)}),
    ("serve m --enable-hierarchical-cache --hicache-size 30", {"kv_tier": ("host?optional", "host:30GB?optional")}),
    ("serve m --kv-tier host:1GB --kv-tier disk:/a:5GB", {"kv_tier": ("host:1GB", "disk:/a:5GB")}),
    ("serve m --kv-tier host:1GB disk:/a:5GB", {"kv_tier": ("host:1GB", "disk:/a:5GB")}),
    ("serve m --quantization fp8", {"quantization": "fp8"}),
    ("serve m -q int8", {"quantization": "int8"}),
    ("serve m -q none", {}),
    ("serve m --quantization compressed-tensors", {}),
    (
        """serve m --generation-config vllm --override-generation-config '{"temperature": 0.5}'""",
        {"generation_config": "none", "override_generation_config": {"temperature": 0.5}},
    ),
    ("""serve m --limit-mm-per-prompt '{"image": 2}' --guided-decoding-backend guidance""", {}),
    ("serve m --model-impl transformers", {"model_implementation": "transformers"}),
    ("serve m --model-impl vllm", {"model_implementation": "kvern"}),
    ("""serve m --structured-outputs-config '{"backend": "auto"}'""", {}),
    ("serve m --structured-outputs-config.backend guidance", {}),
    ("serve m --scheduling-policy priority --kv-cache-dtype auto", {"policy": "priority"}),
    (
        "serve m --attention-backend FLASH_ATTN --stream-interval 4",
        {"attention_backend": "flash_attn", "stream_interval": 4},
    ),
    (
        "serve m --attention-backend TRITON_ATTN --disable-cascade-attn",
        {"attention_backend": "triton", "shared_prefix_attention": False},
    ),
    ("serve m --compilation-config.level 3 -O0 --no-enable-dbo", {}),
    ("serve m --task generate --runner auto --disable-frontend-multiprocessing --enable-server-load-tracking", {}),
    (
        """serve m --compilation-config '{"level": 3}' --cudagraph-capture-sizes 1 2 4 --max-waiting-queue-length 9""",
        {"max_queue": 9},
    ),
]


@pytest.mark.sample(20)
@pytest.mark.parametrize(("line", "expected"), DOCUMENTED)
def test_documented_commands_are_understood(line: str, expected: dict[str, Any]) -> None:
    command, _ = parsed(line)
    assert differences(command) == {"model": "m"} | expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "serve m --decode-context-parallel-size 2",
            "--decode-context-parallel-size 2 is refused: an engine is one device, or the ranks of",
        ),
        ("serve m -dcp 4", "-dcp 4 is refused: an engine is one device, or the ranks of --tensor-parallel-size"),
        (
            "serve m -dp 2 --data-parallel-backend ray",
            "--data-parallel-backend ray is refused: engines and ranks on several machines are --executor ray",
        ),
        (
            """serve m --eplb-config '{"num_redundant_experts": 4}'""",
            "--eplb-config is refused: copies of experts are --redundant-experts N, and --rebalance-experts SECONDS",
        ),
        ("serve m --node-rank 1", "--node-rank is refused: engines and ranks on several machines are --executor ray"),
        (
            "serve m --enable-sleep-mode",
            "--enable-sleep-mode is refused: models of a server of several sleep by themselves",
        ),
        (
            "serve m --kv-cache-dtype fp8_e5m2",
            "8-bit keys and values are e4m3 or integers; kv_cache_dtype is one of auto,",
        ),
        (
            "serve m --quantization hqq",
            "--quantization hqq is refused: how weights are stored is read from the checkpoint",
        ),
        (
            "serve m --tool-call-parser step3",
            "--tool-call-parser step3 is refused: there is no such parser; tool_parser is",
        ),
        ("serve m --speculative-config {}", "speculative decoding is --draft-model MODEL, or --proposer ngram"),
        (
            "serve m --guided-decoding-backend xgrammar",
            "--guided-decoding-backend xgrammar is refused: llguidance follows all grammars: give auto, or leave",
        ),
        (
            """serve m --structured-outputs-config '{"backend": "xgrammar"}'""",
            "--structured-outputs-config xgrammar is refused: llguidance follows all grammars: give auto, or leave",
        ),
        ("serve m --rope-scaling {}", "--rope-scaling is refused: give it by --hf-overrides"),
        ("serve m --speculative-config.method ngram", "--speculative-config.method is refused: speculative decoding"),
        ("serve m --lora-modules {}", "it must have a name and a path"),
        ("serve m --structured-outputs-config [", "'[' is not JSON"),
        ("serve m --hf-overrides [", "'[' is not JSON"),
        ("serve m --allowed-origins [", "allowed_origins has '[': it must be a text, or a JSON list of texts"),
        ("serve m --api-key", "--api-key needs a value"),
        ("serve m --port --host h", "--port needs a value"),
        ("serve m --max-num-seqs 1.5", "--max-num-seqs is '1.5': expected int"),
        ("serve m --batching both", "--batching is 'both': it must be one of continuous, static"),
        ("serve m --no-port", "there is no option --no-port"),
        ("serve m --enable-prefix-caching=true", "--enable-prefix-caching takes no value"),
        ("serve m --prefix-cache=false", "--prefix-cache takes no value"),
        ("serve m --gpu-memory-utilization", "--gpu-memory-utilization needs a value"),
        ("serve m --gpu-memory-utilization 1.5", "gpu_memory_share is 1.5: it must be above 0 and 1 at most"),
        ("serve m --max-num-seq 3", "there is no option --max-num-seq: did you mean --max-num-seqs, which is kvern's "),
        ("serve m --prefix-caching", "did you mean --prefix-cache?"),
        ("chat m --ssl-keyfile k", "--ssl-keyfile is an option of kvern serve alone"),
        ("serve m --allowed-local-media-path /x", "--allowed-local-media-path is an option of kvern run alone"),
        ("models --max-num-seqs 3", "there is no option --max-num-seqs"),
    ],
)
def test_what_kvern_cannot_do_is_refused_with_the_reason(
    line: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(line)) == 2
    shown = capsys.readouterr().err
    assert reason in shown and len(shown.splitlines()) == 1


def test_documented_benchmarks_are_understood() -> None:
    line = (
        "bench serve --backend vllm --model m --endpoint /v1/completions --dataset-name random --num-prompts 10 "
        "--request-rate inf --trust-remote-code --tokenizer-mode auto --goodput ttft:200 tpot:50 "
        "--header a=b --header c=d"
    )
    command, notes = parsed(line)
    asked = vars(command)
    assert (asked["goodput"], asked["header"]) == (("ttft:200", "tpot:50"), ("a=b", "c=d"))
    assert asked["request_rate"] == float("inf") and notes == []


def test_what_has_no_effect_is_said_once() -> None:
    _, notes = parsed(
        "serve m --compilation-config 4 --compilation-config=8 --enable-auto-tool-choice --no-enable-expert-parallel"
    )
    (note,) = notes
    assert note.startswith("--compilation-config has no effect: nothing is compiled by torch.compile")


def test_files_may_use_names_of_vllm(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: m\nmax-num-seqs: 64\nenforce-eager: true\nenable-prefix-caching: false\nuvicorn-log-level: info\n"
        "served-model-name: a\nlora-modules: [sql=/a, {name: math, path: /b}]\ntensor_parallel_size: 1\n"
        "max-model-len: auto\ntrust-remote-code: false\nquantization: null\ngeneration-config: vllm\n"
    )
    command, notes = parsed(f"serve --config {file} --max-num-seqs 32", VLLM_API_KEY="k")
    assert differences(command) == {
        "model": "m",
        "max_batch_requests": 32,
        "cuda_graphs": False,
        "prefix_cache": False,
        "served_model_name": ("a",),
        "adapters": {"sql": "/a", "math": "/b"},
        "generation_config": "none",
        "api_key": ("k",),
    }
    assert [note.partition(" has")[0] for note in notes] == [f"{file}: uvicorn-log-level"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", range(4))
def test_texts_of_flags_stand_for_those_of_a_file(tmp_path: Path, count: int) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"api-key: {[str(number) for number in range(count)]}")
    for line, expected in (("", tuple(map(str, range(count)))), ("--api-key a --api-key b", ("a", "b"))):
        assert parsed(f"serve m --config {file} {line}")[0].server.api_key == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("enable-sleep-mode: true", "enable-sleep-mode is refused: models of a server of several sleep by themselves"),
        ('enable-prefix-caching: "false"', "enable-prefix-caching is 'false': it must be true or false"),
        ("max-num-seqs: many", "max-num-seqs is 'many': expected int"),
        ("- a", "is not valid YAML: it must be a mapping"),
        ("a: [", "is not valid YAML"),
        ("max-num-seq: 3", "max-num-seq is no option: did you mean max_num_seqs?"),
    ],
)
def test_files_are_refused_with_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "config.yml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_defaults([f"--config={file}"], {})
    assert reason in str(error.value)


def test_the_key_of_vllm_stands_behind_the_own_one() -> None:
    assert read_defaults([], {"VLLM_API_KEY": "a", "KVERN_API_KEY": "b"}).server.api_key == ("b",)
    assert read_defaults([], {"VLLM_API_KEY": "a"}).server.api_key == ("a",)
    assert parsed("serve --api-key c", VLLM_API_KEY="a")[0].server.api_key == ("c",)


def test_every_row_of_the_table_gives_options_that_exist() -> None:
    known = {name: hint for kind in (*KINDS, RunCommand) for name, hint in typing.get_type_hints(kind).items()}
    for name, rule in VLLM.items():
        if isinstance(rule, Named):
            assert rule.option in known or rule.option == "adapter", name
            assert name not in known or rule.option == name
        elif isinstance(rule, Switch):
            kind = known[rule.option]
            assert kind is bool or str in typing.get_args(kind) or rule.yes in typing.get_args(kind), name


def test_help_about_a_word_knows_names_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help", "max-num-seqs"]) == 0
    shown = capsys.readouterr().out
    assert "--max-num-seqs, of vLLM, is kvern's --max-batch-requests" in shown
    assert "Most requests that run at the same time." in shown
    assert main(["serve", "--help=remote"]) == 0
    assert "--trust-remote-code, of vLLM, has no effect: models are computed by code" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize("line", [FIRST_SERVER, pytest.param(SECOND_SERVER, marks=pytest.mark.nightly)])
def test_documented_commands_give_a_server(line: str) -> None:
    with serving(*shlex.split(line)) as server:
        answer = server.client("token-abc123").chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=4, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None and answer.usage.completion_tokens == 4


def test_what_both_have_with_other_values_is_known_without_the_table() -> None:
    own = {name for kind in KINDS for name in typing.get_type_hints(kind)}
    assert {name for name in own if name in VLLM or name.removeprefix("no_") in VLLM} == SHARED


@pytest.mark.sample(1)
@pytest.mark.parametrize(("line", "imported"), [("--port 0 --no-prefix-cache", False), ("--dtype float", True)])
def test_the_table_is_imported_for_a_flag_that_needs_it(line: str, imported: bool) -> None:
    program = "import os, sys; from kvern.cli.main import read_command; read_command(sys.argv[1:], os.environ)"
    shown = f"{program}; print('kvern.options.vllm' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", shown, "serve", MODEL, *line.split()], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(imported)]
