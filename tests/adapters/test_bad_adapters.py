"""What is no adapter of this model is refused, by name and with the reason, and disturbs nobody."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern import LLM, SamplingParams
from kvern.adapters.bank import AdapterBank
from kvern.adapters.check import check_files
from kvern.adapters.names import MOST_LOADING, AdapterNames
from kvern.adapters.peft import read_adapter
from kvern.errors import ConfigError, InvalidAdapter, InvalidRequest
from kvern.models.loader import load_model
from tests.support.families import make_checkpoint
from tests.support.peft_adapters import make_adapter, merge

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = [5, 9, 17, 33, 2, 81]
OPTIONS: dict[str, Any] = {"max_model_len": 96, "max_batch_requests": 8, "kv_cache_tokens": 1024, "threads": 1}

Spoil = Callable[[Path], None]


def config(**changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return spoil


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        weights = load_file(file)
        change(weights)
        save_file(weights, file)

    return spoil


Q = "base_model.model.model.layers.0.self_attn.q_proj"
BAD: dict[str, tuple[Spoil, str]] = {
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json cannot be read"),
    "no weights": (
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        "safetensors cannot be read: No such file",
    ),
    "config cut": (lambda folder: (folder / "adapter_config.json").write_text("{"), "is not JSON"),
    "config a list": (lambda folder: (folder / "adapter_config.json").write_text("[]"), "not an object"),
    "weights cut": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 100),
        "adapter_model.safetensors cannot be read",
    ),
    "weights empty": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b""), "cannot be read"),
    "prompt tuning": (config(peft_type="PROMPT_TUNING"), "peft_type is 'PROMPT_TUNING'"),
    "dora": (config(use_dora=True), "use_dora is True"),
    "a variant that is not known": (config(use_tomorrows_lora=True), "use_tomorrows_lora is True"),
    "bias": (config(bias="all"), "bias is 'all'"),
    "modules to save": (config(modules_to_save=["lm_head"]), "modules_to_save"),
    "pissa": (config(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
    "rank zero": (config(r=0), "r"),
    "rank a text": (config(r="eight"), r"\$\.r"),
    "bad pattern": (config(rank_pattern={"(": 4}), "not a regular expression"),
    "other rank": (config(r=6), r"lora_A\.weight is \[8, \d+\], and rank 6 of its configuration"),
    "rank too high": (config(r=4000), "128"),
    "not targeted": (config(target_modules=["k_proj"]), "target_modules does not name it"),
    "excluded": (config(exclude_modules=["layers.0.self_attn.q_proj"]), "or exclude_modules does"),
    "excluded by pattern": (config(exclude_modules=r".*[.]0[.].*q_proj"), "or exclude_modules does"),
    "bad exclusion": (config(exclude_modules="("), "not a regular expression"),
    "arrow": (config(arrow_config={"top_k": 3}), "arrow_config"),
    "other base": (
        tensors(lambda weights: weights.update({f"{Q}.lora_A.weight": torch.zeros(8, 32)})),
        r"q_proj\.lora_A\.weight is \[8, 32\]",
    ),
    "no such layer": (
        tensors(lambda weights: weights.update({f"{Q}.lora_A.weight".replace(".0.", ".9."): torch.zeros(8, 64)})),
        r"layers\.9\.self_attn\.q_proj\.lora_B\.weight is missing",
    ),
    "more layers": (
        tensors(
            lambda weights: weights.update(
                {name.replace(".1.", ".2."): weights[name].clone() for name in list(weights)}
            )
        ),
        r"layers\.2\.\S+ is no linear layer of this model",
    ),
    "no B": (
        tensors(lambda weights: weights.pop(f"{Q}.lora_B.weight")),
        r"q_proj\.lora_B\.weight is missing",
    ),
    "a layer missing": (
        tensors(lambda weights: [weights.pop(f"{Q}.lora_{side}.weight") for side in "AB"]),
        r"layers\.0\.self_attn\.q_proj\.lora_A\.weight is missing",
    ),
    "not finite": (tensors(lambda weights: weights[f"{Q}.lora_A.weight"].fill_(torch.nan)), "not finite"),
    "scale": (config(lora_alpha=1e40), "holds numbers that are not finite in float32"),
    "magnitudes": (
        tensors(lambda weights: weights.update({f"{Q}.lora_magnitude_vector": torch.zeros(64)})),
        "lora_magnitude_vector",
    ),
    "output layer": (
        tensors(
            lambda weights: weights.update(
                {
                    "base_model.model.lm_head.lora_A.weight": torch.zeros(8, 64),
                    "base_model.model.lm_head.lora_B.weight": torch.zeros(288, 8),
                }
            )
        ),
        "lm_head is an embedding or the output layer",
    ),
}


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one that is as it should be, of rank 8."""
    return make_adapter(tiny_model, tmp_path_factory.mktemp("adapter") / "all", 1, r=8, lora_alpha=4)


@pytest.fixture(scope="module")
def expected(tiny_model: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What the model merged with it answers."""
    with LLM(str(merge(tiny_model, adapter, tmp_path_factory.mktemp("merged"))), **OPTIONS) as llm:
        return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def running(tiny_model: Path, adapter: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), adapters={"all": str(adapter)}, max_adapter_rank=8, **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("kind", BAD)
def test_bad_adapters_are_refused_by_name_and_disturb_nobody(
    kind: str, adapter: Path, running: LLM, expected: list[int], tmp_path: Path
) -> None:
    spoil, message = BAD[kind]
    folder = tmp_path / "bad"
    shutil.copytree(adapter, folder)
    spoil(folder)
    stream = running.stream(PROMPT, GREEDY, adapter="all")
    next(stream)
    with pytest.raises(InvalidAdapter, match=message):
        running.load_adapter("bad", str(folder))
    *_, last = stream
    assert last.outputs[0].token_ids == expected
    assert "bad" not in running.adapters


def test_experts_are_not_adapted(tmp_path: Path) -> None:
    decoder = load_model(make_checkpoint("mixtral", tmp_path / "model"))
    bank = AdapterBank(decoder, 1, 8, kernels=False)
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["w1"]})
    )
    name = "base_model.model.model.layers.0.block_sparse_moe.experts.0.w1"
    weights = {f"{name}.lora_A.weight": torch.zeros(2, 48), f"{name}.lora_B.weight": torch.zeros(80, 2)}
    save_file(weights, folder / "adapter_model.safetensors")
    with pytest.raises(InvalidAdapter, match=r"experts\.0\.w1 is of experts"):
        read_adapter(folder, decoder.spec, bank.targets, 8, torch.float32)


def test_names_ranks_and_places_are_checked(tiny_model: Path, adapter: Path, tiny_llm: LLM, tmp_path: Path) -> None:
    path = str(adapter)
    small = make_adapter(tiny_model, tmp_path / "small", 0, r=1, lora_alpha=2, target_modules=["q_proj", "v_proj"])
    model = str(tiny_model)
    with LLM(model, max_adapter_rank=7, adapters={"small": str(small)}, **OPTIONS) as llm:
        with pytest.raises(InvalidAdapter, match="rank 8, above max_adapter_rank 7"):
            llm.load_adapter("all", path)
        with pytest.raises(InvalidAdapter, match="small is loaded already"):
            llm.load_adapter("small", path)
        with pytest.raises(InvalidAdapter, match="not valid"):
            llm.load_adapter("with space", path)
        with pytest.raises(InvalidRequest, match="2 prompts and 1 adapters"):
            llm.generate([PROMPT] * 2, GREEDY, adapter=["small"])
        with pytest.raises(InvalidRequest, match="there is no adapter 'none'"):
            llm.unload_adapter("none")
    with pytest.raises(InvalidAdapter, match="set max_adapters"):
        tiny_llm.load_adapter("all", path)
    with pytest.raises(InvalidAdapter, match=r"adapter_config\.json cannot be read"):
        LLM(model, adapters={"gone": "/nowhere"}, **OPTIONS)
    with pytest.raises(ConfigError, match="max_adapters is 0"):
        LLM(model, adapters={"all": path}, max_adapters=0, **OPTIONS)


def test_few_adapters_are_loaded_at_the_same_time() -> None:
    names = AdapterNames()
    first, *_ = [names.reserve(f"adapter-{number}", "folder") for number in range(MOST_LOADING)]
    with pytest.raises(InvalidAdapter, match="are being loaded"):
        names.reserve("more", "folder")
    names.add(first)
    names.remove(first.name)
    names.reserve(first.name, "folder")


def test_weights_that_change_while_they_are_read_are_refused(
    adapter: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_model(tiny_model)
    bank = AdapterBank(decoder, 1, 8, kernels=False)
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)

    def cut(*arguments: Any) -> Any:
        checked = check_files(*arguments)
        with (folder / "adapter_model.safetensors").open("r+b") as file:
            file.truncate(5000)
        return checked

    monkeypatch.setattr("kvern.adapters.peft.check_files", cut)
    with pytest.raises(InvalidAdapter, match="it ends at byte 5000"):
        read_adapter(folder, decoder.spec, bank.targets, 8, torch.float32)
