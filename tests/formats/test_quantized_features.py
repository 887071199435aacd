"""Every format of weights and cache with every feature of requests: answers in a batch are those that come alone."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, RequestOutput, SamplingParams
from kvern.config import EngineConfig
from kvern.layers.build import Build
from kvern.layers.unquantized import Unquantized
from kvern.models.checkpoint import read_headers
from kvern.models.decoder import Decoder
from kvern.models.folder import model_folder
from kvern.models.loader import read_config, stored_methods
from kvern.models.registry import spec_from_config
from kvern.quantize import job
from kvern.quantize.calibration import Calibration
from kvern.quantize.checkpoint import Checkpoint
from kvern.quantize.scheme import FP8, INT8, Scheme, int4
from kvern.request.sampling_params import StructuredOutput
from tests.support.cache_folder import cache_folder
from tests.support.four_bit_checkpoints import AWQ, GPTQ, LINEAR, of_tests
from tests.support.gguf_files import write_gguf
from tests.support.packers import Pack, awq, gptq, nf4, nvfp4, store
from tests.support.peft_adapters import make_adapter
from tests.support.tiny_model import make_tiny_model

DIVISIBLE = r"(?<!down)_proj$"
"""Layers whose inputs are in blocks of 64."""
DATE = r"20[0-9]{2}-(0[1-9]|1[0-2])"
PROMPT = "The quick brown fox jumps over the lazy dog, and the dog"


def by_kvern(*schemes: Scheme) -> Callable[[Path, Path], Path]:
    """The schemes in turn, by `kvern quantize`."""

    def make(model: Path, folder: Path) -> Path:
        checkpoint = Checkpoint(model, torch.device("cpu"))
        plan = {name: schemes[number % len(schemes)] for number, name in enumerate(checkpoint.matrices)}
        rows = torch.randint(5, 280, (2, 16), generator=torch.Generator().manual_seed(0))
        settings = job.Settings(plan, job.make_method("rtn"))
        job.quantize(checkpoint, settings, Calibration(rows, "numbers"), folder / "quantized")
        return folder / "quantized"

    return make


def by_packer(pack: Pack, config: Mapping[str, Any], layers: str = LINEAR) -> Callable[[Path, Path], Path]:
    return lambda model, folder: store(model, folder, pack, layers, config).quantized


def as_gguf(kind: str) -> Callable[[Path, Path], Path]:
    return lambda model, folder: write_gguf(model, folder, kind).file


@dataclass(frozen=True)
class Format:
    """How a model is stored: what makes it of a plain one, and the engine's options for it."""

    make: Callable[[Path, Path], Path] = lambda model, folder: model
    options: Mapping[str, Any] = field(default_factory=dict)


FORMATS = {
    "FP8": Format(by_kvern(FP8)),
    "FP8, made while loading": Format(options={"quantization": "fp8"}),
    "INT8": Format(by_kvern(INT8)),
    "INT8, made while loading": Format(options={"quantization": "int8"}),
    "INT4": Format(by_kvern(int4(32))),
    "INT4, zero points": Format(by_kvern(int4(32, symmetric=False))),
    "mixed": Format(by_kvern(INT8, int4(32), FP8)),
    "GPTQ": Format(by_packer(gptq, GPTQ)),
    "GPTQ, activation order": Format(by_packer(partial(gptq, act_order=3), GPTQ | {"desc_act": True})),
    "AWQ": Format(by_packer(awq, AWQ)),
    "NVFP4": Format(by_packer(nvfp4, of_tests("nvfp4"))),
    "NF4": Format(by_packer(nf4, of_tests("nf4") | {"layers": DIVISIBLE}, DIVISIBLE)),
    "GGUF Q4_0": Format(as_gguf("Q4_0")),
    "GGUF Q8_0": Format(as_gguf("Q8_0")),
    "output layer in INT8": Format(options={"head_quantization": "int8"}),
    "KV cache in FP8": Format(options={"kv_cache_dtype": "fp8"}),
    "KV cache in INT8": Format(options={"kv_cache_dtype": "int8"}),
    "FP8 with a KV cache in FP8": Format(by_kvern(FP8), {"kv_cache_dtype": "fp8"}),
}
DAILY = ("mixed", "GGUF Q4_0", "FP8 with a KV cache in FP8")

GREEDY = SamplingParams(temperature=0, max_tokens=10)
REQUESTS: dict[str, tuple[SamplingParams, str | None]] = {
    "plain": (GREEDY, None),
    "adapter": (GREEDY, "sharp"),
    "structured": (GREEDY.replace(structured=StructuredOutput(regex=DATE)), None),
    "structured, adapter": (GREEDY.replace(structured=StructuredOutput(regex=DATE)), "sharp"),
    "beams": (SamplingParams(beam_width=3, n=3, max_tokens=6, temperature=None), None),
    "beams, adapter": (SamplingParams(beam_width=3, n=3, max_tokens=6, temperature=None), "sharp"),
}


@dataclass(frozen=True)
class Models:
    plain: Path
    adapter: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    plain = make_tiny_model(folder / "plain")
    return Models(plain, make_adapter(plain, folder / "adapter", 3, r=4))


def engine(models: Models, name: str, folder: Path, **options: Any) -> LLM:
    """With the model in a format; the folder is made once."""
    known = folder / "made.json"
    if not known.is_file():
        known.write_text(json.dumps(str(FORMATS[name].make(models.plain, folder))))
    base: dict[str, Any] = {
        "adapters": {"sharp": str(models.adapter)},
        "block_size": 4,
        "max_model_len": 96,
        "kv_cache_tokens": 2048,
        "dtype": "float32",
    }
    path = json.loads(known.read_text())
    if path.endswith(".gguf"):
        base["tokenizer"] = str(models.plain)
    return LLM(path, cache_dir=cache_folder(folder / "cache"), **(base | dict(FORMATS[name].options) | options))


def answers(llm: LLM, names: list[str]) -> dict[str, RequestOutput]:
    """Of these requests, all in one batch."""
    asked = [REQUESTS[name] for name in names]
    outputs = llm.generate(
        [PROMPT] * len(asked), [params for params, _ in asked], adapter=[adapter for _, adapter in asked]
    )
    return dict(zip(names, outputs, strict=True))


def tokens(output: RequestOutput) -> list[list[int]]:
    return [list(answer.token_ids) for answer in output.outputs]


def check_promises(found: Mapping[str, RequestOutput]) -> None:
    """What each feature promises, whatever the weights are."""
    assert tokens(found["plain"]) != tokens(found["adapter"])
    for name in ("structured", "structured, adapter"):
        assert re.fullmatch(DATE, found[name].outputs[0].text), found[name].outputs[0].text
    for name in ("beams", "beams, adapter"):
        beams = found[name].outputs
        assert len({tuple(beam.token_ids) for beam in beams}) == 3
        scores = [beam.cumulative_logprob / len(beam.token_ids) for beam in beams if beam.cumulative_logprob]
        assert len(scores) == 3 and scores == sorted(scores, reverse=True)


CPU_CASES = [pytest.param(name, marks=() if name in DAILY else pytest.mark.nightly) for name in FORMATS]


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
@pytest.mark.parametrize("name", CPU_CASES)
def test_answers_are_those_that_come_alone(name: str, models: Models, tmp_path: Path) -> None:
    """Adapters, grammars and beams in one batch, the second time out of the prefix cache."""
    with engine(models, name, tmp_path, prefix_cache=False, threads=1) as llm:
        alone = {request: answers(llm, [request])[request] for request in REQUESTS}
        check_promises(alone)
    with engine(models, name, tmp_path, threads=1) as llm:
        for again in (False, True):
            found = answers(llm, list(REQUESTS))
            assert {request: tokens(output) for request, output in found.items()} == {
                request: tokens(output) for request, output in alone.items()
            }
            assert all(output.cached_tokens > 0 for output in found.values()) or not again


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
@pytest.mark.parametrize("name", FORMATS)
def test_a_model_is_finished_before_its_weights_are_there(name: str, models: Models, tmp_path: Path) -> None:
    """A start records on the meta device which kernels a model launches; nothing there has a value."""
    path = FORMATS[name].make(models.plain, tmp_path)
    options = dict(FORMATS[name].options) | ({"tokenizer": str(models.plain)} if str(path).endswith(".gguf") else {})
    config = EngineConfig(str(path), cache_dir=cache_folder(tmp_path / "cache"), **options)
    folder = model_folder(config)
    described = read_config(folder)
    spec = spec_from_config(described)
    given = Unquantized(), config.quantization, config.has_int8_head("cpu")
    methods = stored_methods(described, spec, read_headers(folder), *given)
    decoder = Decoder(spec, Build(torch.bfloat16, torch.device("meta"), 96, linear=methods))
    decoder.finish()
    assert all(tensor.is_meta for tensor in decoder.parameters())


GPU_CASES = [
    pytest.param(
        name,
        graphs,
        marks=() if graphs or at % 3 == 0 else pytest.mark.nightly,
        id=f"{name}-{'graphs' * graphs or 'eager'}",
    )
    for at, name in enumerate(FORMATS)
    for graphs in (True, False)
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
@pytest.mark.parametrize(("name", "graphs"), GPU_CASES)
def test_features_keep_their_promises_on_a_gpu(name: str, graphs: bool, models: Models, tmp_path: Path) -> None:
    options = {"device": "cuda", "dtype": "bfloat16", "cuda_graphs": graphs, "max_batch_requests": 16}
    with engine(models, name, tmp_path, **options) as llm:
        for again in (False, True):
            found = answers(llm, list(REQUESTS))
            check_promises(found)
            assert all(output.cached_tokens > 0 for output in found.values()) or not again
        # Two at a time: of a single row activations are not rounded, which may change a random model's answer.
        singles = {request: answers(llm, [request, request])[request] for request in ("plain", "adapter")}
        assert all(tokens(output)[0][0] == tokens(found[request])[0][0] for request, output in singles.items())
