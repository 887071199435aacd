"""Models whose layers keep states: whatever becomes of a request, its state is that of its own tokens."""

import json
import random
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern import LLM, SamplingParams
from kvern.cache.states import state_marks
from kvern.config import EngineConfig
from kvern.errors import ConfigError, CorruptCheckpoint
from kvern.layers import delta_net, mamba2
from kvern.layers import states as layer_states
from kvern.layers.convolution import CHUNK
from kvern.models.loader import load_model, read_config
from kvern.models.registry import spec_from_config
from kvern.request.request import PromptInput, Request, RequestSpec
from kvern.request.sampling_params import ResolvedParams, StructuredOutput
from kvern.request.step import SchedulerOutput, StepResult, StepTooLarge
from kvern.runner.device import check_state_kernels, check_states
from kvern.runner.executor import Executor
from kvern.runner.memory import bytes_of_state
from kvern.runner.plan import FreeMemory, ProbedDevice, agree, lay_out
from tests.support.failing_runner import FailingRunner
from tests.support.families import make_checkpoint, reference_greedy, reference_score, similar_prompts
from tests.support.idle import is_idle
from tests.support.internals import core_of
from tests.support.model_outputs import error
from tests.support.peft_adapters import make_adapter, merge
from tests.support.processors import install
from tests.support.state_families import rule_inputs

OUTPUT = 8
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "max_model_len": 64,
    "block_size": 4,
    "max_batch_requests": 4,
    "max_batch_tokens": 11,
}


several_families = pytest.mark.parametrize(
    "folder",
    ["qwen3_next", "granitemoehybrid", pytest.param("lfm2", marks=pytest.mark.nightly)],
    indirect=True,
)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer; of Qwen3-Next where a test does not name others."""
    family = getattr(request, "param", "qwen3_next")
    made = make_checkpoint(family, tmp_path_factory.mktemp("hybrid"), vocab_size=288, eos_token_id=1)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model / name, made)
    return made


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return similar_prompts(200)


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return [reference_greedy(folder, prompt, OUTPUT) for prompt in prompts]


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("tokens", [1, 2, CHUNK, 2 * CHUNK + 1])
@pytest.mark.parametrize("rule", [delta_net, mamba2], ids=["delta_rule", "state_space"])
def test_chunks_give_what_single_tokens_give(rule: ModuleType, tokens: int) -> None:
    advance, advance_run = rule.advance, rule.advance_run
    inputs = list(rule_inputs(rule, tokens))
    shape = (4, 8, 5) if rule is delta_net else (2, 8, 10)
    begun = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = begun.double()
    reads = [advance(exact[None], *(item[place : place + 1].double() for item in inputs))[0] for place in range(tokens)]
    state = begun.clone()
    found = advance_run(state, *inputs)
    torch.testing.assert_close(found, torch.stack(reads).float(), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(state, exact.float(), atol=2e-6, rtol=1e-5)
    cut, half = begun.clone(), -(-tokens // 2)
    pieces = [advance_run(cut, *(item[first : first + half] for item in inputs)) for first in range(0, tokens, half)]
    torch.testing.assert_close(torch.cat(pieces), found, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("gathered", [0, 1 << 18], ids=["in place", "gathered"])
def test_each_token_of_a_step_meets_its_own_state(gathered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_states, "GATHERED_BYTES", gathered)
    inputs = list(rule_inputs(mamba2, 9))
    memory = torch.randn(6, 2, 8, 10, generator=torch.Generator().manual_seed(0))
    after, turns = memory.clone(), [(0, 1, 5), (1, 3, 2), (4, 1, 0), (5, 1, 3), (6, 3, 4)]  # first, tokens, state
    expected = [
        mamba2.advance_run(after[state], *(item[first : first + count] for item in inputs))
        for first, count, state in turns
    ]
    tokens, alone = torch.tensor([(first, state) for first, count, state in turns if count == 1]).unbind(1)
    step = layer_states.StepStates([], tokens, alone, [turn for turn in turns if turn[1] > 1])
    found = layer_states.advance_states(step, memory, inputs, mamba2.advance, mamba2.advance_run)
    torch.testing.assert_close(found, torch.cat(expected), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(memory, after, atol=2e-6, rtol=1e-5)


@pytest.mark.sample(1)
@several_families
@pytest.mark.parametrize("kv_cache_tokens", [4 * 64, 64])
def test_chunks_preemptions_and_hits_change_no_answer(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], kv_cache_tokens: int
) -> None:
    with LLM(str(folder), **OPTIONS, kv_cache_tokens=kv_cache_tokens) as llm:
        dice = random.Random(5)
        for budget in (4, 7, 11):
            core_of(llm).scheduler.limits = core_of(llm).scheduler.limits.__class__(budget, 4, 100)
            order = dice.sample(range(len(prompts)), len(prompts))
            assert answers(llm, [prompts[place] for place in order]) == [expected[place] for place in order]
        statistics = llm.statistics()
        assert is_idle(llm)
    assert (statistics.preemptions > 0) == (kv_cache_tokens == 64)
    assert statistics.cached_tokens > 0


@several_families
def test_a_conversation_goes_on_with_the_state_behind_its_last_turn(folder: Path, prompts: list[list[int]]) -> None:
    with LLM(str(folder), **OPTIONS, kv_cache_tokens=512) as llm:
        said = prompts[0] + answers(llm, prompts[:1])[0]
        assert answers(llm, [[*said, 77, 78]]) == [reference_greedy(folder, [*said, 77, 78], OUTPUT)]
        # the last token was sampled and not computed
        assert llm.statistics().cached_tokens == len(said) - 1


@several_families
def test_what_two_prompts_share_is_kept_when_a_third_may_come(folder: Path, prompts: list[list[int]]) -> None:
    with LLM(str(folder), **OPTIONS, kv_cache_tokens=512) as llm:
        hits = []
        for prompt in prompts[1:4]:
            answers(llm, [prompt])
            hits.append(llm.statistics().cached_tokens)
    assert hits == [0, 0, 16], "the second computes the shared blocks anew, and leaves a state at their end"


@pytest.mark.parametrize(
    ("start", "known", "apart", "marks"),
    [
        (0, 0, 1, (48,)),
        (0, 16, 32, (16, 48)),
        (0, 32, 32, (32,)),
        (0, 0, 49, ()),
        (17, 16, 31, (48,)),
        (17, 16, 32, ()),
    ],
)
def test_a_prompt_takes_no_step_for_a_state_just_behind_another(
    start: int, known: int, apart: int, marks: tuple[int, ...]
) -> None:
    request = Request(RequestSpec("", PromptInput(list(range(50))), ResolvedParams(), 100))
    assert state_marks(request, (start, known), start, 16, apart) == marks


@pytest.mark.sample(2)
@several_families
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples_and_beams_go_on_with_copies(folder: Path, prompts: list[list[int]], prefix_cache: bool) -> None:
    params = [
        SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=6, ignore_eos=True),
        SamplingParams(beam_width=3, n=2, max_tokens=5, ignore_eos=True),
    ]
    found = []
    for options in ({"kv_cache_tokens": 512}, {"kv_cache_tokens": 72, "max_batch_tokens": 5}):
        with LLM(str(folder), **(OPTIONS | options), prefix_cache=prefix_cache) as llm:
            outputs = llm.generate([prompts[1], prompts[1]], params)
            found.append([[answer.token_ids for answer in output.outputs] for output in outputs])
            assert is_idle(llm)
    assert found[0] == found[1]
    best = found[0][1][0]
    worse = reference_score(folder, prompts[1], reference_greedy(folder, prompts[1], 5))
    assert reference_score(folder, prompts[1], best) >= worse - 1e-4, "three beams find nothing worse than one"


@pytest.mark.sample(2)
@several_families
@pytest.mark.parametrize("where", ["before", "behind", "result"])
def test_a_failed_step_leaves_no_state_behind(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], where: str
) -> None:
    with LLM(str(folder), **OPTIONS, kv_cache_tokens=512) as llm:
        runner = FailingRunner(llm, where)
        marked = [[*prompts[0][:7], 250, *prompts[0][8:]], [*prompts[2], 251]]
        found = llm.generate([*prompts[:3], *marked, *prompts[3:]], GREEDY, on_error="return")
        assert [bool(output.failure) for output in found] == [False] * 3 + [True] * 2 + [False] * 3
        assert [output.outputs[0].token_ids for output in (*found[:3], *found[5:])] == expected
        assert runner.failures and is_idle(llm)
        assert answers(llm, prompts) == expected, "what is cached is right"


@pytest.mark.sample(1)
@several_families
def test_a_step_that_runs_out_of_memory_begins_anew_in_parts(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever states it has changed by then."""
    with LLM(str(folder), **OPTIONS, kv_cache_tokens=512) as llm:
        core: Any = core_of(llm)
        worker, sizes = core.executor._worker, []
        execute = worker.runner.execute

        def small_device(output: SchedulerOutput) -> StepResult:
            result: StepResult = execute(output)
            if output.token_count > 3:
                raise StepTooLarge("(0 MiB free)", final=True) from torch.OutOfMemoryError("as planned")
            sizes.append(output.token_count)
            return result

        monkeypatch.setattr(worker.runner, "execute", small_device)
        core.executor = Executor(worker)
        outputs = llm.generate(prompts, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert sizes and max(sizes) <= 3
        assert is_idle(llm)


def test_forms_are_kept(folder: Path, prompts: list[list[int]]) -> None:
    form = StructuredOutput(json={"type": "array", "items": {"enum": [1, 22, "a"]}, "maxItems": 3})
    params = SamplingParams(temperature=1.0, seed=2, n=3, max_tokens=32, structured=form)
    with LLM(str(folder), **OPTIONS, kv_cache_tokens=512) as llm:
        for answer in llm.generate([prompts[1]], params)[0].outputs:
            assert set(json.loads(answer.text)) <= {1, 22, "a"}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_adapters_reach_the_projections_of_delta_nets(folder: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    modules = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"]
    adapter = make_adapter(folder, tmp_path / "one", 1, target_modules=modules)
    merged = merge(folder, adapter, tmp_path / "merged")
    with LLM(str(folder), **OPTIONS, kv_cache_tokens=512, adapters={"one": str(adapter)}) as llm:
        outputs = llm.generate([prompts[1], prompts[1]], GREEDY, adapter=["one", None])
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == [reference_greedy(path, prompts[1], OUTPUT) for path in (merged, folder)]
    assert found[0] != found[1]


def test_logits_processors_are_applied(
    folder: Path, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path)))
    with LLM(str(folder), **OPTIONS, kv_cache_tokens=512, logits_processors=["follow"]) as llm:
        params = GREEDY.replace(logits_processors={"follow": {"by": 3}})
        assert answers(llm, [[*prompts[1], 20]], params) == [[23 + 3 * place for place in range(OUTPUT)]]


def test_what_states_do_not_go_with_yet_is_refused_by_name(folder: Path) -> None:
    spec, gpu = spec_from_config(read_config(folder)), torch.device("cuda")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"deterministic": True}, "deterministic .*last bits"),
        (
            {"kv_tier": ("host:1MB",), "proposer": "ngram", "pipeline_parallel_size": 2},
            "kv_tier host:1MB with speculation and pipeline stages .*leave kv_tier or speculation out",
        ),
    ]
    for options, reason in refused:
        with pytest.raises(ConfigError, match=reason):
            check_states(EngineConfig(model="model", **options), spec)
    check_states(EngineConfig(model="model", max_adapters=1), spec)
    check_states(EngineConfig(model="model", kv_tier=("host:1MB",), pipeline_parallel_size=2), spec)
    with pytest.raises(ConfigError, match="their kernels do not work on this GPU"):
        check_state_kernels(spec, frozenset({"batch", "sampling"}), gpu)


def test_the_memory_plan_counts_states(folder: Path) -> None:
    spec = spec_from_config(read_config(folder))
    state_bytes = bytes_of_state(spec, torch.bfloat16)
    assert state_bytes == 2 * (6 * 12 * 20 * 4 + 3 * (2 * 2 * 12 + 6 * 20) * 2)
    room = FreeMemory(100 * state_bytes + 10 * 256 * 8, 8, state_bytes=state_bytes)
    asked: list[dict[str, Any]] = [{}, {"prefix_cache": False}, {"max_batch_requests": 7}]
    for options, requests, states in zip(asked, (25, 50, 7), (50, 50, 14), strict=True):
        config = EngineConfig(model="model", **options)
        layout = lay_out([room], agree([ProbedDevice("cpu", "bfloat16")], config, spec), config)
        assert (layout.max_batch_requests, layout.states) == (requests, states)
        assert layout.blocks * layout.block_size * 8 + states * state_bytes <= room.cache_bytes + 128
    for tokens in (None, 256):
        config = EngineConfig(model="model", max_batch_requests=60, kv_cache_tokens=tokens)
        plan = agree([ProbedDevice("cpu", "bfloat16")], config, spec)
        with pytest.raises(ConfigError, match=r"the states of 60 requests take .* lower max_batch_requests, or leave"):
            lay_out([room], plan, config)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("nemotron_h", {"moe_latent_size": None, "use_bias": True, "use_conv_bias": False, "n_group": 2}),
        ("falcon_h1", {"mamba_norm_before_gate": True}),
        ("falcon_h1", {"mamba_rms_norm": False, "mamba_d_ssm": None}),
        ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_conv_bias": False}),
        ("granitemoehybrid", {"layer_types": ["full_attention"] * 3}),
        ("lfm2", {"block_auto_adjust_ff_dim": False, "conv_bias": False, "tie_word_embeddings": True}),
    ],
)
def test_variants_agree_with_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path, **changes)
    assert error(load_model(folder), folder) < 1e-4


def test_published_checkpoints_have_fused_experts_and_draft_heads(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_5_moe", tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for prefix in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
        parts = {
            kind: torch.stack([tensors.pop(f"{prefix}.experts.{expert}.{kind}_proj.weight") for expert in range(6)])
            for kind in ("gate", "up", "down")
        }
        tensors[f"{prefix}.experts.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
        tensors[f"{prefix}.experts.down_proj"] = parts["down"].contiguous()
    tensors["mtp.fc.weight"] = torch.zeros(2, 2)
    save_file(tensors, file, metadata={"format": "pt"})
    assert error(load_model(folder), folder) < 1e-4
    save_file({name: item for name, item in tensors.items() if not name.endswith("A_log")}, file)
    with pytest.raises(CorruptCheckpoint, match=r"2 missing: model.layers.0.linear_attn.A_log \[6\]"):
        load_model(folder)
