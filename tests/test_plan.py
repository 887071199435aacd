"""``kvern plan``: it counts what models take, its estimates are near what was measured, and it chooses by them."""

import json
import tomllib
from pathlib import Path

import pytest

from kvern.cli.main import main
from kvern.errors import ConfigError
from kvern.models.loader import outline_model
from kvern.models.precision import shares
from kvern.planning.estimate import Model, Split, Workload, estimate, splits
from kvern.planning.hardware import CARDS, parse_hardware, this_machine

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


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, Model]:
    outlines = {name: outline_model(folder, load_format="dummy") for name, folder in folders.items()}
    return {name: Model(outline.spec, "bfloat16", shares(outline)) for name, outline in outlines.items()}


def test_estimates_are_near_what_was_measured(models: dict[str, Model]) -> None:
    """Of Llama-3.1-8B on an H200, as docs/PERFORMANCE.md has it: 4.11 and 5.27 ms a step, 39 400 prompt tokens/s."""
    found = estimate(models["8b"], CARDS["h200"], Split(1, 1), Workload(32, 128, 256))
    assert found.decode_one == pytest.approx(4.11e-3, rel=0.1)
    assert 32 / found.rate == pytest.approx(5.27e-3, rel=0.15)
    prompt = estimate(models["8b"], CARDS["h200"], Split(1, 1), Workload(1, 4096, 1))
    assert 4096 / prompt.first_token == pytest.approx(39_400, rel=0.15)


def test_ranks_share_weights_and_keys(models: dict[str, Model]) -> None:
    one, two, sixteen = (
        estimate(models["70b"], CARDS["b200"], Split(ranks, 1), Workload(1, 100, 100)) for ranks in (1, 2, 16)
    )
    assert one.weights == sum(share.nbytes for share in models["70b"].shares)
    assert 0.5 * one.weights <= two.weights < 0.501 * one.weights
    assert two.token_bytes == one.token_bytes / 2
    assert sixteen.token_bytes == one.token_bytes / 8, "a rank has a head at least"


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
    assert found.lacks == "weights of 141.1 GB are more than a card's 85.0" and found.rate == 0
    tight = estimate(models["8b"], CARDS["l4"], Split(1, 1), Workload(1, 100_000, 1000))
    assert "no room for a sequence of 101,000 tokens" in tight.lacks


def test_weights_that_ranks_cannot_share_are_not_divided(models: dict[str, Model]) -> None:
    whole = Model(models["8b"].spec, "bfloat16", models["8b"].shares, plain=False)
    assert {split.tensor for split in splits(4, whole)} == {1}
    assert [split.pipeline for split in splits(4, whole)] == [1, 2, 4], "but by layers they are"


def test_one_request_wants_all_cards(models: dict[str, Model]) -> None:
    together, apart = (
        estimate(models["8b"], CARDS["l4"], split, Workload(1, 1024, 256)) for split in (Split(2, 1), Split(1, 2))
    )
    assert together.rate > apart.rate and together.decode_one < apart.decode_one


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
    assert json.loads(capsys.readouterr().out)["splits"][0]["split"] == {"tensor": 2, "data": 1, "pipeline": 1}


def test_a_model_that_fits_nowhere_is_an_error(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folders["70b"]), "--load-format", "dummy", "--hardware", "l4"]) == 1
    out = capsys.readouterr().out
    assert "fits in no way" in out and "kvern quantize --method int4" in out
    assert main(["plan", str(folders["70b"]), "--load-format", "dummy", "--hardware", "2x l4"]) == 1
    assert "with tensor 2 x data 1 weights of 70.6 GB" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("text", ["", "toaster", "0x h200", "99x h200", "h200 x2"])
def test_unknown_hardware_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is unknown"):
        parse_hardware(text)


def test_bad_workloads_are_refused(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(folders["8b"]), "--load-format", "dummy", "--hardware", "h200"]
    for wrong in (["--requests", "0"], ["--input", "0"], ["--output", "-1"], ["--input", "140000"]):
        assert main([*arguments, *wrong]) == 2
        assert "kvern: error:" in capsys.readouterr().err


def test_this_machine_has_a_card_or_a_processor() -> None:
    cards = this_machine()
    assert cards and all(card.memory > 0 and card.bandwidth > 0 and card.rate > 0 for card in cards)
