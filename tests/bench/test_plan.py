"""``kvern plan``: it counts what models take, and it chooses by its estimates."""

import json
import random
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvern.bench import prediction
from kvern.bench.prediction import predicted_seconds
from kvern.bench.workloads import Workload as Measured
from kvern.cli.main import main, read_command
from kvern.cli.serve import planned
from kvern.config import EngineConfig
from kvern.cpu.library import captured
from kvern.engine.engine import Engine
from kvern.engine.factory import factors_of_steps
from kvern.errors import ConfigError
from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_format import linear_methods
from kvern.layers.unquantized import Unquantized
from kvern.models.loader import outline_model
from kvern.models.precision import shares
from kvern.planning import hardware
from kvern.planning.choice import _share, choose, model_of
from kvern.planning.estimate import EXPOSED, Model, Split, Workload, estimate, prompt_seconds, seconds_of, splits
from kvern.planning.hardware import (
    CARDS,
    PCIE,
    Card,
    check_alike,
    host_build,
    linked,
    measured_host,
    names_of,
    parse_hardware,
    this_machine,
)
from kvern.planning.splitting import COPIED, REST_TOKENS, SHORT_TOKENS, Roles, advice, roles
from tests.support.cache_folder import load_kernels, pretend_tiles

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
    "num_key_value_heads": 8,
}
SIZES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of which there is a configuration alone."""
    root = tmp_path_factory.mktemp("models")
    for name, sizes in SIZES.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(LLAMA | sizes))
    return {name: root / name for name in SIZES}


MIXTURE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, Model]:
    outlines = {name: outline_model(folder, load_format="dummy") for name, folder in folders.items()}
    return {name: Model(outline.spec, "bfloat16", shares(outline)) for name, outline in outlines.items()}


def test_requests_take_until_the_longest_has_ended(models: dict[str, Model]) -> None:
    """Those of one length take what the plan says."""
    card = CARDS["h200"]
    one, both, longer = (
        seconds_of(models["8b"], card, Split(1, 1), lengths, 2)
        for lengths in ([(100, 300)], [(100, 100), (100, 100)], [(100, 100), (100, 300)])
    )
    alone = one - seconds_of(models["8b"], card, Split(1, 1), [(100, 100)], 1)
    assert longer == pytest.approx(both + alone, rel=0.01)
    planned = estimate(models["8b"], card, Split(1, 1), Workload(64, 1024, 256))
    alike = seconds_of(models["8b"], card, Split(1, 1), [(1024, 256)] * 64, 64)
    assert alike == pytest.approx(64 * 256 / planned.rate, rel=0.01)
    in_turns = seconds_of(models["8b"], card, Split(1, 1), [(1024, 256)] * 64, 16)
    assert in_turns == pytest.approx(4 * seconds_of(models["8b"], card, Split(1, 1), [(1024, 256)] * 16, 16))


def test_prompts_of_ranks_run_beside_most_of_their_sums(models: dict[str, Model]) -> None:
    """Long ones, where ranks reach each other's memory."""
    card = CARDS["h200"]
    free, slow = replace(card, link=1e15, delay=0.0), replace(card, link=PCIE)

    def seconds(which: Card, length: int) -> float:
        return estimate(models["70b"], which, Split(2, 1), Workload(1, length, 1)).first_token

    def sums(which: Card, rows: int) -> float:
        return 160 * (which.delay + rows * 8192 * 2 / which.link)

    assert seconds(card, 4096) - seconds(free, 4096) == pytest.approx(EXPOSED * sums(card, 4096), rel=1e-3)
    assert seconds(card, 512) - seconds(free, 512) == pytest.approx(sums(card, 512), rel=1e-3)
    assert seconds(slow, 4096) - seconds(free, 4096) == pytest.approx(sums(slow, 4096), rel=1e-3)


def test_ranks_share_weights_and_keys(models: dict[str, Model]) -> None:
    one, two, sixteen = (
        estimate(models["70b"], CARDS["b200"], Split(ranks, 1), Workload(1, 100, 100)) for ranks in (1, 2, 16)
    )
    assert one.weights == sum(share.nbytes for share in models["70b"].shares)
    assert 0.5 * one.weights <= two.weights < 0.501 * one.weights
    assert two.token_bytes == one.token_bytes / 2
    assert sixteen.token_bytes == one.token_bytes / 8, "a rank has a head at least"


def test_experts_are_cut_or_placed_whole(tmp_path: Path) -> None:
    def of(width: int) -> Model:
        (tmp_path / "config.json").write_text(json.dumps(MIXTURE | {"moe_intermediate_size": width}))
        outline = outline_model(tmp_path, load_format="dummy")
        return Model(outline.spec, "bfloat16", shares(outline))

    model = of(768)
    found = {str(split): estimate(model, CARDS["h200"], split, Workload(1, 100, 100)) for split in splits(4, model)}
    cut, placed, one = (found[f"tensor {name}"] for name in ("4 x data 1", "4 x data 1, whole experts", "1 x data 4"))
    assert cut.weights == placed.weights < 0.26 * one.weights
    assert cut.decode_one < placed.decode_one, "of 8 experts a rank has more than its part"
    assert {split.tensor for split in splits(3, of(770))} == {1}
    assert [str(split) for split in splits(4, of(770)) if split.pipeline == 1][1:] == [
        "tensor 2 x data 2",
        "tensor 2 x data 2, whole experts",
        "tensor 4 x data 1, whole experts",
    ]


def test_quantized_experts_are_cut_where_their_groups_allow(tmp_path: Path) -> None:
    stored = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE | stored))
    model = model_of(EngineConfig(str(tmp_path), load_format="dummy"), tmp_path)
    assert [str(split) for split in splits(4, model) if split.pipeline == 1][1:] == [
        "tensor 2 x data 2",
        "tensor 2 x data 2, whole experts",
        "tensor 4 x data 1, whole experts",
    ]


def test_heads_bound_how_a_model_is_divided(models: dict[str, Model]) -> None:
    assert {split.tensor for split in splits(6, models["8b"])} == {1, 2}, "32 heads are no multiple of 3"
    assert [str(split) for split in splits(4, models["8b"])] == [
        "tensor 1 x data 4",
        "tensor 1 x pipeline 2 x data 2",
        "tensor 1 x pipeline 4 x data 1",
        "tensor 2 x data 2",
        "tensor 2 x pipeline 2 x data 1",
        "tensor 4 x data 1",
    ]


def test_stages_divide_layers_and_the_requests_of_a_step(models: dict[str, Model]) -> None:
    """The first has the embeddings beside half of what steps read; a step of a stage has half of the requests."""
    model, workload = models["8b"], Workload(32, 1024, 256)
    one, two = (estimate(model, CARDS["h200"], Split(1, 1, stages), workload) for stages in (1, 2))
    embeddings = sum(share.nbytes for share in model.shares if share.kind == "embeddings")
    assert two.weights == (one.weights - embeddings) / 2 + embeddings
    assert two.token_bytes == one.token_bytes / 2
    half = estimate(model, CARDS["h200"], Split(1, 1), Workload(16, 1024, 256))
    assert two.decode == pytest.approx(half.decode, rel=0.01)
    assert two.decode_one == pytest.approx(one.decode_one, rel=0.01), "one request is nowhere faster"
    assert 1.2 * one.rate < two.rate < 2 * one.rate


def test_what_does_not_fit_says_so(models: dict[str, Model]) -> None:
    found = estimate(models["70b"], CARDS["h100"], Split(1, 1), Workload())
    assert found.lacks == "weights of 141.11 GB are more than a card's 85.00 GB" and found.rate == 0
    tight = estimate(models["8b"], CARDS["l4"], Split(1, 1), Workload(1, 100_000, 1000))
    assert "no room for a sequence of 101,000 tokens" in tight.lacks


def test_groups_of_weights_bound_how_a_model_is_divided(models: dict[str, Model]) -> None:
    for block, expected in ((128, [1, 2, 4]), (1024, [1, 2])):  # of the 14,336 inputs of an MLP's second layer
        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, block]}}
        model = replace(models["8b"], linear=linear_methods(config, Unquantized()))
        found = list(splits(4, model))
        assert [split.tensor for split in found if split.pipeline == 1] == expected
        assert {split.pipeline for split in found} == {1, 2, 4}, "but by layers they are"


def test_one_request_wants_all_cards(models: dict[str, Model]) -> None:
    together, apart = (
        estimate(models["8b"], CARDS["l4"], split, Workload(1, 1024, 256)) for split in (Split(2, 1), Split(1, 2))
    )
    assert together.rate > apart.rate and together.decode_one < apart.decode_one


def divided(model: Model, engines: int, workload: Workload) -> list[Roles]:
    return roles(model, CARDS["h200"], [estimate(model, CARDS["h200"], Split(1, engines), workload)], workload)


def test_prefill_engines_are_weighed_by_what_they_give_and_cost(models: dict[str, Model]) -> None:
    workload = Workload(32, 8192, 128)
    both, apart = divided(models["8b"], 2, workload)
    assert (both.name, apart.name) == ("2 do both", "1 prefill + 1 decode")
    assert both.rate == estimate(models["8b"], CARDS["h200"], Split(1, 2), workload).rate
    assert apart.between < both.between / 10 and apart.first_short < both.first_short
    assert apart.first_long > both.first_long, "all prompts wait for one engine"
    prompt = estimate(models["8b"], CARDS["h200"], Split(1, 1), workload).first_token
    assert apart.rate == pytest.approx(128 / prompt, rel=0.01), "which computes one after another"
    assert advice([both, apart]).startswith("Prefill engines cost throughput and time to the first token by")
    assert "would give 33% fewer tokens/s" in advice([both, apart])
    assert advice(divided(models["8b"], 2, Workload(16, 30_000, 1000))).startswith("Prefill engines pay by")
    assert advice(divided(models["8b"], 2, Workload(1, 8192, 128))).startswith("Prefill engines do not pay by")
    assert [item.name for item in divided(models["8b"], 4, workload)] == [
        "4 do both",
        "1 prefill + 3 decode",
        "2 prefill + 2 decode",
        "3 prefill + 1 decode",
    ]


def test_pages_of_all_steps_of_a_prompt_but_the_last_are_copied_beside_that(models: dict[str, Model]) -> None:
    """Of 8192 tokens, 131 kB each, the copies of 2048 are waited for; of models with windows all."""
    plain = models["8b"]
    layer, *others = plain.spec.layers
    windowed = replace(layer, mixer=replace(layer.mixer, window=4096))
    for model, tokens in ((plain, 2048), (replace(plain, spec=replace(plain.spec, layers=(windowed, *others))), 8192)):
        _, apart = divided(model, 2, Workload(1, 8192, 128))
        prompt, rest = (prompt_seconds(model, CARDS["h200"], Split(1, 1), size, 8192) for size in (8192, REST_TOKENS))
        copies = 2 * tokens * 2 * 32 * 8 * 128 * 2 / COPIED
        assert apart.first_long == pytest.approx(prompt + copies + rest + apart.between)


def test_no_division_answers_more_requests_than_there_are(models: dict[str, Model]) -> None:
    dice = random.Random(5)
    for _ in range(40):
        workload = Workload(dice.randint(1, 300), dice.randint(SHORT_TOKENS, 30_000), dice.randint(2, 2000))
        for item in divided(models["8b"], dice.randint(2, 5), workload)[1:]:
            alone = estimate(models["8b"], CARDS["h200"], Split(1, 1), replace(workload, requests=1))
            fastest = alone.first_token + (workload.output - 1) * alone.decode_one
            assert 0 < item.rate <= workload.requests * workload.output / fastest * 1.001
            assert item.first_long > item.first_short * 0.9 and item.between >= alone.decode_one


def test_there_is_nothing_to_divide(models: dict[str, Model]) -> None:
    assert divided(models["8b"], 1, Workload()) == []
    assert divided(models["8b"], 2, Workload(input=SHORT_TOKENS - 1)) == []
    assert divided(models["70b"], 2, Workload(input=100_000)) == [], "it does not fit on one card"


def test_the_command_tells_whether_prefill_engines_pay(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", str(folders["8b"]), "--load-format", "dummy", "--hardware", "2x h200", "--input", "8192"]
    assert main(arguments) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "by their roles (estimates)" in out and "--prefill-engines 1 --decode-engines 1 would give" in out
    assert main([*arguments, "--json"]) == 0
    assert [item["prefill"] for item in json.loads(capsys.readouterr().out)["roles"]] == [0, 1]


def test_the_command_chooses_and_writes(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "plan.toml"
    arguments = ["plan", str(folders["70b"]), "--load-format", "dummy", "--hardware", "2x h200"]
    assert main([*arguments, "--write", str(target)]) == 0
    assert "Chosen: tensor 2 x data 1" in capsys.readouterr().out
    assert tomllib.loads(target.read_text()) == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
    }
    assert main([*arguments, "--json"]) == 0
    split = {"tensor": 2, "data": 1, "pipeline": 1, "whole_experts": False}
    assert json.loads(capsys.readouterr().out)["splits"][0]["split"] == split


@pytest.mark.nightly
def test_plans_are_of_weights_as_options_load_them(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(str(folders["8b"]), load_format="dummy")
    stored, wide, eight, four = (
        estimate(model_of(replace(config, **options), folders["8b"]), CARDS["b200"], Split(1, 1), Workload(1, 100, 100))
        for options in ({}, {"dtype": "float32"}, {"quantization": "fp8"}, {"quantization": "int4"})
    )
    assert wide.weights == 2 * stored.weights and wide.token_bytes == 2 * stored.token_bytes
    assert 0.5 * stored.weights < eight.weights < 0.6 * stored.weights
    assert 0.25 * stored.weights < four.weights < 0.45 * stored.weights
    assert eight.decode_one < 0.75 * stored.decode_one
    cards = [CARDS["rtx-5090"]] * 2
    assert "fits in no way" in choose(replace(config, model=str(folders["70b"])), cards).reason
    target = tmp_path / "plan.toml"
    arguments = ["plan", str(folders["70b"]), "--load-format", "dummy", "--hardware", "2x rtx-5090", "--requests", "1"]
    assert main([*arguments, "--quantization", "int4", "--dtype", "float16", "--write", str(target)]) == 0
    written = tomllib.loads(target.read_text())
    assert written["quantization"] == "int4" and written["dtype"] == "float16" and written["tensor_parallel_size"] == 2
    assert main([*arguments, "--quantization", "int8"]) == 1
    assert "kvern quantize" not in capsys.readouterr().out


@pytest.mark.nightly
def test_a_model_that_fits_nowhere_is_an_error(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folders["70b"]), "--load-format", "dummy", "--hardware", "l4"]) == 1
    out = capsys.readouterr().out
    assert "fits in no way" in out and "kvern quantize --method int4" in out
    assert main(["plan", str(folders["70b"]), "--load-format", "dummy", "--hardware", "2x l4"]) == 1
    assert "with tensor 2 x data 1 weights of 70.5" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("text", ["", "toaster", "0x h200", "99x h200", "h200 x2"])
def test_unknown_hardware_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is unknown"):
        parse_hardware(text)


def test_bad_workloads_are_refused(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(folders["8b"]), "--load-format", "dummy", "--hardware", "h200"]
    for wrong in (["--requests", "0"], ["--input", "0"], ["--output", "-1"], ["--input", "140000"]):
        assert main([*arguments, *wrong]) == 2
        assert "kvern plan: error:" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_server_takes_what_the_plan_chooses(folders: dict[str, Path]) -> None:
    """Unless its options do not go with it."""
    config = EngineConfig(str(folders["70b"]), load_format="dummy")
    choice = choose(config, [CARDS["h200"]] * 2)
    assert (choice.tensor_parallel_size, choice.data_parallel_size) == (2, 1)
    assert choice.reason.startswith(
        "2 x h200 of 150 GB, linked by NVLink: Chosen: tensor 2 x data 1. Tensor 1 x data 2 "
    )
    choice = choose(config, [CARDS["l4"]] * 2)
    assert "linked by PCIe: It fits in no way" in choice.reason and choice.tensor_parallel_size == 1
    short = choose(replace(config, max_model_len=64), [CARDS["b200"]])
    assert short.reason == "1 x b200 of 191 GB: Nothing else is possible: tensor 1 x data 1."


def test_unlike_cards_are_named() -> None:
    with pytest.raises(ConfigError, match=r"GPUs differ \(0: h100 with 85 GB, 1: l4 with 24 GB\)"):
        check_alike([CARDS["h100"], CARDS["l4"]])
    with pytest.raises(ConfigError, match=r"0: h100 with 85 GB, 1: h100 with 40 GB"):
        check_alike([CARDS["h100"], replace(CARDS["h100"], memory=40e9)])


@pytest.mark.parametrize("pairs", [True, False])
def test_links_are_those_that_the_driver_tells(pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three GPUs of which one has no NVLink to another, PCIe is the slowest link."""
    import pynvml

    def status(one: str, other: str, what: int) -> int:
        assert what == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        return int(pynvml.NVML_P2P_STATUS_OK if pairs or {one, other} != {"0", "2"} else 1)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetP2PStatus", status)
    cards = linked([CARDS["h100"]] * 3, ["0", "1", "2"])
    assert names_of(cards) == f"3 x h100 of 85 GB, linked by {'NVLink' if pairs else 'PCIe'}"
    assert len({(card.link, card.delay) for card in cards}) == 1


@pytest.mark.nightly
def test_a_server_plans_where_there_are_several_gpus(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own, which sees no GPU here; never where somebody has said it, nor with one GPU or none."""
    engine = EngineConfig(str(folders["8b"]), load_format="dummy")
    for gpus in ([], ["0"]):
        monkeypatch.setattr("kvern.serving.places.seen_gpus", lambda config, gpus=gpus: gpus)
        assert planned(engine) is engine
    monkeypatch.setattr("kvern.serving.places.seen_gpus", lambda config: ["0", "1"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert planned(engine) == engine
    said = capsys.readouterr().err
    assert "kvern: 1 x CPU of " in said and said.endswith("(-tp, -pp and -dp say it otherwise)\n")
    for arguments, environment, divided in (
        (["m"], {}, False),
        (["m", "-tp", "1"], {}, True),
        (["m", "--data-parallel-size=1"], {}, True),
        (["m"], {"KVERN_DATA_PARALLEL_SIZE": "1"}, True),
    ):
        command, _ = read_command(["serve", *arguments], environment)
        assert command.divided is divided


def test_this_machine_has_a_card_or_a_processor() -> None:
    for dtype in ("float32", "float16"):
        cards = this_machine(EngineConfig(), dtype)
        assert cards and all(card.memory > 0 and card.bandwidth > 0 and card.rate > 0 for card in cards)


def products(config: EngineConfig, dtype: str, kernels: frozenset[str] | None = None) -> list[tuple[str, int]]:
    """Kernels that are called, once each, and their rows, while the CPU is measured."""
    build = host_build(config, dtype, kernels)
    with captured() as (calls, _):
        measured_host(build, 2**12, 64)
    return sorted({(call.name, call.given[4]) for call in calls if call.name != "kvern_pack_linear"})


def test_a_cpu_is_measured_by_the_products_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor may take forty times as long for PyTorch's products in 16 bits as for those of kvern's kernels."""
    load_kernels("cpu_linear", 1)
    pretend_tiles(monkeypatch, there=False)
    multiplied = [("kvern_linear", 1), ("kvern_linear", 64)]
    config = EngineConfig(threads=1)
    assert products(config, "bfloat16") == products(config, "float32") == multiplied
    assert products(config, "float16") == products(replace(config, cpu_kernels=False), "bfloat16") == []
    assert products(config, "bfloat16", frozenset()) == []  # an engine that started before there were kernels
    pretend_tiles(monkeypatch, there=True)
    assert products(replace(config, deterministic=True), "bfloat16") == multiplied


def test_an_engine_and_its_benchmark_measure_the_products_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[BuildOptions] = []

    def measured(build: BuildOptions) -> Card:
        found.append(build)
        return Card("CPU", 1e9, 1e9, 1e12, 1e12, host=True)

    monkeypatch.setattr(hardware, "quickly_measured_host", measured)
    monkeypatch.setattr(prediction, "measured_host", measured)
    for config in (EngineConfig("kvern-1m", threads=1, device="cpu", cpu_kernels=kernels) for kernels in (True, False)):
        found.clear()
        engine = Engine(config)
        factors = factors_of_steps(engine.config, engine.folder, engine.layout)()
        assert factors is not None and predicted_seconds(engine, [Measured("one", [[1] * 8], [8])]) > [0.0]
        engine.close()
        own, benchmark = found
        assert own == benchmark and own.dtype == torch.bfloat16
        assert ("cpu_linear" in own.kernels) is config.cpu_kernels


def test_a_difference_that_rounds_to_nothing_is_none() -> None:
    assert [_share(part, "less") for part in (0.0, 0.004, 0.006, 0.5)] == ["as much", "as much", "1% less", "50% less"]
