"""Models as JAX functions on a CPU: at prefill and decode, over a paged cache, logits are those of PyTorch."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from kvern.errors import InvalidRequest, UnsupportedModel
from kvern.layers.build import Build
from kvern.layers.rope import RopeTable, make_rotate
from kvern.models.loader import LoadOptions, load_model
from kvern.models.registry import spec_from_config
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import BiasSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from kvern.spec.rope_scaling import LinearScaling, RopeScaling
from kvern.spec.rope_stretching import Dynamic, Llama3, LongRope, Proportional, Yarn
from kvern.tpu.refusals import check
from tests.support.configs import GPT_OSS, LLAMA
from tests.support.tpu import make_random, needs_jax

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama3": {"tie_word_embeddings": True, "rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 32}},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "window": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 7, "head_dim": 20},
}
PROMPTS = ([5, 6, 7, 8, 9, 11] * 4, [3, 4, 5, 6, 7, 9], [2] * 8)
"""Of widths that are compiled once: whole chunks of 8."""


def generated(folder: Path, attention: Literal["plain", "pallas"] = "plain", **options: Any) -> Any:
    """The model in PyTorch, and answers of its function, which take the blocks of others in another order."""
    from kvern.tpu.generate import JaxModel, attention_named

    decoder = load_model(folder, LoadOptions(dtype="float32", **options))
    model = JaxModel(decoder, attention_named(attention), 16, block_size=8, chunk=8)
    model.generate(PROMPTS[:2], 2)
    answers = model.generate(PROMPTS, 5)
    assert [len(answer.tokens) for answer in answers] == [5, 5, 5]
    return decoder, answers


@needs_jax
@pytest.mark.parametrize(
    "family", ["llama3", "qwen3", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("biases", "window"))]
)
def test_logits_are_those_of_the_pytorch_model(family: str, tmp_path: Path) -> None:
    from kvern.tpu.generate import compare

    decoder, answers = generated(make_random(tmp_path, FAMILIES[family]))
    found = compare(decoder, answers)
    assert 0 < found.prefill < 1e-4
    assert 0 < found.decode < 1e-4
    assert found.largest > 1
    with torch.no_grad():
        decoder.layers[0].attention_in.weight[0] *= 1.1
    wrong = compare(decoder, answers)
    assert min(wrong.prefill, wrong.decode) > 1e-2
    answers[0].logits[-1] = answers[0].logits[-1] * float("nan")
    assert not compare(decoder, answers).decode < 1, "nothing is equal to what is no number"


@needs_jax
@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3", "window"])
def test_logits_by_the_interpreted_kernel_are_those_of_the_pytorch_model(family: str, tmp_path: Path) -> None:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    from kvern.tpu.generate import compare

    found = compare(*generated(make_random(tmp_path, FAMILIES[family]), "pallas"))
    assert max(found.prefill, found.decode) < 1e-4
    assert not interpret_pallas_call.races.races_found


@needs_jax
@pytest.mark.nightly
def test_codes_of_quantized_weights_become_numbers(tmp_path: Path) -> None:
    from kvern.tpu.generate import compare

    decoder, answers = generated(make_random(tmp_path, FAMILIES["qwen3"]), quantization="int4")
    assert decoder.layers[0].mlp.down_proj.method.name != "unquantized"
    found = compare(decoder, answers)
    assert max(found.prefill, found.decode) < 1e-4


@needs_jax
def test_answers_end_at_stop_tokens_and_give_their_blocks_back(tmp_path: Path) -> None:
    from kvern.tpu.generate import JaxModel, attention_named

    decoder = load_model(make_random(tmp_path, FAMILIES["qwen3"] | {"num_hidden_layers": 1}))
    model = JaxModel(decoder, attention_named("plain"), 4, block_size=8, chunk=8)
    [whole] = model.generate([PROMPTS[1]], 6)
    stop = whole.tokens[2]
    [short] = model.generate([PROMPTS[1]], 6, [stop])
    assert short.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
    for prompts, tokens, what in ((PROMPTS, 6, "3 rows of 4 blocks"), (PROMPTS[:1], 500, "max_model_len is 512")):
        with pytest.raises(InvalidRequest, match=what):
            model.generate(prompts, tokens)
    assert model.generate([PROMPTS[1]], 6)[0].tokens == whole.tokens


SCALINGS: dict[str, RopeScaling] = {
    "linear": LinearScaling(2.0),
    "llama3": Llama3(8.0, 1.0, 4.0, 32),
    "yarn": Yarn(4.0, 32, 1.2),
    "dynamic": Dynamic(2.0, 32),
    "longrope": LongRope((1.0,) * 8, (1.5,) * 8, 32, 1.1),
    "proportional": Proportional(0.5),
}


@needs_jax
@pytest.mark.parametrize("dim", [16, 12])
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_scaling_rotates_as_in_pytorch(interleaved: bool, dim: int) -> None:
    import jax.numpy as jnp
    import numpy as np

    from kvern.tpu.function import rotated, rotation

    x = torch.randn(96, 3, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(96)
    for scaling in SCALINGS.values():
        if isinstance(scaling, LongRope) and dim != 16:
            continue
        rope = RopeSpec(10000.0, dim, scaling, interleaved)
        table = RopeTable(rope, Build(torch.float32, torch.device("cpu"), 128))
        expected = make_rotate(rope, 16)(x, table(positions))
        turn = rotation(rope, jnp.asarray(positions.numpy())[None], 128, jnp.float32)
        found = np.asarray(rotated(jnp.asarray(x.numpy())[None], rope, *turn))[0]
        np.testing.assert_allclose(found, expected.numpy(), atol=2e-5, rtol=0)


def test_what_a_function_does_not_compute_is_refused_by_name() -> None:
    for config, what in (
        (LLAMA, None),
        (LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, None),
        (LLAMA | {"hidden_act": "gelu"}, "llama cannot become a JAX function: layers.mlp.activation is 'gelu';"),
        (GPT_OSS, "layers.mixer.sinks is True, layers.mlp is MoeSpec"),
        (
            LLAMA | {"model_type": "gemma2", "architectures": []},
            "layers.mixer.softcap is 50.0, layers.mlp.activation is",
        ),
    ):
        spec = spec_from_config(config)
        if what is None:
            check(spec)
            continue
        with pytest.raises(UnsupportedModel) as refused:
            check(spec)
        assert what in str(refused.value)


def test_parts_that_a_model_may_lack_and_may_not_have_together() -> None:
    attention, mlp = AttentionSpec(2, 1, 16, 0.25), MlpSpec(32)
    check(ModelSpec("own", 16, 32, (LayerSpec(attention, None, mlp),), 64, biases=BiasSpec(head=True)))
    tied = ModelSpec("own", 16, 32, (LayerSpec(attention, None, mlp),), 64, tie_word_embeddings=True)
    check(tied)
    with pytest.raises(UnsupportedModel, match=r"biases\.head is True, and the head tied;"):
        check(replace(tied, biases=BiasSpec(head=True)))
    with pytest.raises(UnsupportedModel, match=r"layers\.mixer is None"):
        check(ModelSpec("own", 16, 32, (LayerSpec(None, None, mlp),), 64))
    with pytest.raises(UnsupportedModel, match=r"layers\.mlp is None"):
        check(ModelSpec("own", 16, 32, (LayerSpec(attention, None, None),), 64))
