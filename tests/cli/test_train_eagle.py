"""A head that is trained guesses what the model says, and is what the engine loads."""

import json
from pathlib import Path

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.cli.main import main
from kvern.draft_training.job import HeadSize, Settings, TrainedHead, Training, check_model, drafted_tokens
from kvern.drafting.models.formats import load_draft_head
from kvern.errors import ConfigError
from kvern.models.loader import LoadOptions, load_model
from kvern.models.registry import spec_from_config
from kvern.quantize.writer import writing
from tests.support.draft_heads import eagle3_enter, eagle3_logits, eagle3_states
from tests.support.head_drafting import states_of
from tests.support.tiny_model import CONFIG, make_tiny_model

TEXT = "the quick brown fox jumps over the lazy dog. " * 300


def test_its_steps_are_those_of_a_head_that_drafts(tmp_path: Path) -> None:
    """Step j at a place is what the head gives there when it has read the text up to j places before."""
    torch.manual_seed(0)
    size = HeadSize(
        hidden=32, width=48, heads=4, kv_heads=2, head_dim=8, entries=3, drafted=50, epsilon=1e-5, theta=1e4
    )
    head = TrainedHead(size)
    inputs, embedded = torch.randn(2, 9, 96), torch.randn(2, 9, 32)
    scores = head(inputs, embedded, 3)
    weights = dict(head.state_dict()) | {"d2t": torch.zeros(50, dtype=torch.int64)}
    config = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-5,
        "vocab_size": 50,
    }
    for row in range(2):
        entered = eagle3_enter(weights, config, inputs[row])
        for read in range(1, 7):
            states = entered[:read]
            for step in range(3):
                last = eagle3_states(weights, config, embedded[row, : read + step], states)[-1:]
                found = eagle3_logits(weights, config, last)[0]
                torch.testing.assert_close(scores[step][row, read + step - 1], found, rtol=1e-4, atol=1e-4)
                states = torch.cat((states, last))


def test_it_learns_and_is_loaded(tmp_path: Path) -> None:
    target = make_tiny_model(tmp_path / "target")
    decoder = load_model(target, LoadOptions(max_model_len=64))
    rows = torch.arange(3, 35).repeat(40).view(20, 64)
    drafted = drafted_tokens(rows, decoder.spec.vocab_size, 40)
    training = Training(decoder, rows[:16], drafted, Settings(30, 4, 2, seed=0, learning_rate=3e-3))
    losses: list[float] = []
    training.run(lambda step, tokens, loss: losses.append(loss))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert all(0 <= share <= 1 for share in training.acceptance(rows[16:], 2))
    with writing(tmp_path / "head", 16) as writer:
        training.write(writer, torch.float32, target)
    head = load_draft_head(tmp_path / "head", decoder)
    tokens = rows[0]
    with torch.inference_mode():
        inputs = states_of(decoder, training._entries, tokens)
        torch.testing.assert_close(head.enter(inputs), training.head.fc(inputs))
    assert head.head.eagle3 is not None
    assert head.head.eagle3.entries == training._entries
    assert head.drafted is not None
    assert head.drafted.token_ids.tolist() == drafted.tolist()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = make_tiny_model(tmp_path / "target")
    data = tmp_path / "text.jsonl"
    data.write_text(json.dumps({"text": TEXT}) + "\n")
    options = ["--length", "32", "--batch-rows", "2", "--epochs", "0.1", "--drafts", "2", "--device", "cpu"]
    arguments = ["train-eagle", str(target), "--data", str(data), "--output", str(tmp_path / "head"), *options]
    assert main(arguments) == 0
    assert "tokens a step, 2 drafts" in capsys.readouterr().out
    with LLM(str(target), draft_model=str(tmp_path / "head"), dtype="float32", threads=1, max_model_len=64) as llm:
        [answer] = llm.generate(["the quick"], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    assert len(answer.outputs[0].token_ids) == 16
    assert main(arguments) == 2
    assert "exists" in capsys.readouterr().err
    assert main([*arguments, "--overwrite", "--length", "30000"]) == 2
    assert "it takes" in capsys.readouterr().err


def test_models_whose_states_cannot_be_had_are_refused() -> None:
    latent = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
    experts |= {"n_group": 1, "topk_group": 1}
    config = CONFIG | latent | experts | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    with pytest.raises(ConfigError, match="heads are trained for models without"):
        check_model(spec_from_config(config))
