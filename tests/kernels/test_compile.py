"""Every kernel, in every specialisation that is launched, compiles for cards that are not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.compile_for import launches
from tests.kernels.models import LARGE_MODELS
from tests.support.kernel_list import ranks
from tests.support.kernel_list.quantized import FORMS

pytestmark = pytest.mark.timeout(1200)  # a machine with much else to do takes minutes

FOLDER = Path(__file__).parent
MODULES = sorted(f"tests.kernels.{path.stem}" for path in FOLDER.glob("test_*.py") if "\nLAUNCHES" in path.read_text())
BY_NIGHT = ("lfm2", "nemotron_h", "granitemoehybrid", "falcon_h1", "glm4_moe_lite")
"""Models whose own kernels are among what test modules launch."""
ALL = [name for name in LARGE_MODELS if name not in BY_NIGHT] + MODULES
BY_DAY = ["llama", "qwen3_moe"]
"""Their kernels are those that nearly every model launches; every fourth of them is compiled."""
OTHERS = (80, 89, 100, 120)
"""Cards beside Hopper: A100; L40S and RTX 4090; B200; RTX 5090."""
AMD = ("gfx942", "gfx950")
"""MI300 and MI350."""
OF_AMD = ["gemma2", "glm4_moe_lite", "gemma4_text", "gpt_oss", "lfm2", "granitemoehybrid", "falcon_h1", "nemotron_h"]
OF_AMD += ["qwen3_5_text"]
"""Models of which one form of each kernel is compiled for these."""
OF_STATES = ["nemotron_h", "qwen3_5_text", "--dtype", "float16", "--sample"]
"""Models whose kernels multiply float32 of 11 bits, which not each of these cards does alike."""


def compiled(card: int | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "tests.kernels.compile_for", str(card), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def compile_for(card: int | str, *arguments: str) -> None:
    done = compiled(card, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"for {card if isinstance(card, str) else f'sm_{card}'}, 0 errors" in done.stdout


def test_what_ranks_launch_is_among_the_launches_of_models() -> None:
    labels = [label for label, _ in launches("qwen3_moe", torch.bfloat16, sample=True)]
    assert all(any(f" {kernel.name} (" in label for label in labels) for kernel in ranks.KERNELS)


@pytest.mark.parametrize("of", [BY_DAY, pytest.param(ALL, marks=pytest.mark.nightly)], ids=["some", "all"])
def test_every_kernel_compiles_for_sm90_in_one_form(of: list[str]) -> None:
    compile_for(90, *of, "--sample", *([] if of is ALL else ["--every", "4"]))


@pytest.mark.parametrize(
    ("capability", "models"),
    [
        pytest.param(80, ["llama:fp8"], marks=pytest.mark.nightly),
        pytest.param(89, ["qwen3_moe", "llama:int4_zero"], marks=pytest.mark.nightly),
        pytest.param(100, ["qwen3_moe", "llama:mxfp4"], marks=pytest.mark.nightly),
        pytest.param(120, ["qwen3_moe", "llama:q6_k"], marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_some_launches_compile_for_other_cards(capability: int, models: list[str]) -> None:
    compile_for(capability, *models, "--sample")


@pytest.mark.parametrize(
    ("card", "models"),
    [
        ("gfx942", ["llama", "--sample", "--every", "12"]),
        *(
            pytest.param(card, models, marks=pytest.mark.nightly)
            for card in AMD
            for models in (
                ["llama", "qwen3_moe"],
                ["llama:int4_zero", "llama:fp8", "llama:mxfp4", "--sample"],
                [*OF_AMD, "--sample"],
                OF_STATES,
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value)[:30],
)
def test_kernels_compile_for_amd(card: str, models: list[str]) -> None:
    """Without registers in memory, and within the card's shared memory."""
    compile_for(card, *models)


@pytest.mark.nightly  # registers are spilt slowly
def test_the_gate_for_amd_finds_what_a_card_would_not_run() -> None:
    done = compiled("gfx942", "tests.kernels.amd_faults")
    foreign, spilling, large, counted = done.stdout.splitlines()
    assert done.returncode == 1
    assert "LAUNCHES[0] does not compile: RuntimeError" in foreign
    assert "registers are written to memory" in spilling
    assert "bytes of shared memory, and the card has 65536" in large
    assert "3 errors" in counted


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("capability", [*OTHERS, 90])
@pytest.mark.parametrize("model", LARGE_MODELS)
def test_all_launches_compile_for_every_card(model: str, capability: int, dtype: str) -> None:
    compile_for(capability, model, "--dtype", dtype)


@pytest.mark.nightly
@pytest.mark.parametrize("codes", FORMS)
@pytest.mark.parametrize("capability", [*OTHERS, 90])
def test_products_of_all_codes_compile_for_every_card(codes: str, capability: int) -> None:
    compile_for(capability, *(f"{model}:{codes}" for model in ("llama", "qwen3_moe", "gpt_oss")))


@pytest.mark.nightly
@pytest.mark.parametrize("module", MODULES)
def test_all_launches_of_tests_compile_for_sm90(module: str) -> None:
    compile_for(90, module)
