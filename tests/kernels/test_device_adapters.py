"""Adapters beside layers with states, whose kernels are interpreted here."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvern import LLM, SamplingParams
from tests.support.drafting_requests import PROMPTS
from tests.support.families import make_checkpoint
from tests.support.kernels.device_engines import OPTIONS, WITH_STATES
from tests.support.outputs import token_ids
from tests.support.peft_adapters import make_adapter

pytestmark = pytest.mark.usefixtures("few_products")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("qwen3_5", ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "q_proj"]),
        *[
            pytest.param(family, modules, marks=pytest.mark.nightly)
            for family, modules in {"lfm2": ["in_proj", "out_proj"], "granitemoehybrid": ["q_proj", "v_proj"]}.items()
        ],
    ],
)
def test_adapters_beside_states(family: str, modules: list[str], tmp_path: Path, on_device: Callable[..., LLM]) -> None:
    """In steps with prompts, and of single tokens; a delta net's projection has four parts."""
    changes = WITH_STATES["qwen3_next" if family == "qwen3_5" else family]
    made = make_checkpoint(family, tmp_path / "model", **({"num_hidden_layers": 2} | changes))
    adapter = make_adapter(made, tmp_path / "one", 1, target_modules=modules)
    options = OPTIONS | {"max_adapters": 2, "max_adapter_rank": 16, "adapters": {"one": str(adapter)}}
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    engines = LLM(str(made), device="cpu", **options), on_device(made, **options)
    expected, found = (token_ids(llm.generate(PROMPTS, params, adapter=["one", None, "one"])) for llm in engines)
    assert found == expected
    assert found != token_ids(engines[0].generate(PROMPTS, params))
