"""Two GPUs: the answers of one, whatever is divided and switched on or off, and streams that outlive a rank.

Run with `pytest -m gpu` on a machine with two GPUs.
"""

import os
import signal
import threading
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.drafting.device.draft_graphs import DraftGraphs, DraftRun, DraftSteps
from kvern.errors import EngineDied
from kvern.kernels.linear import StreamShape
from kvern.layers import tuned_linear
from kvern.layers.fused import FusedLayer
from kvern.ranks.peer_sums import TIMED_ROWS, WAYS, Way
from kvern.request.outputs import RequestOutput
from kvern.runner.ranks import rank_sums
from tests.support import expert_requests, noted_replays, rank_requests
from tests.support.divided_families import STAGE_CHANGES, TENSOR_PARALLEL_CHANGES, TENSOR_PARALLEL_FAMILIES
from tests.support.families import CPU_ALONE, make_checkpoint
from tests.support.four_bit_checkpoints import GPTQ, LINEAR
from tests.support.head_drafting import HEAD_KINDS, drafting, make_model_with_layer, write_head
from tests.support.idle import is_idle
from tests.support.internals import vocab_size_of
from tests.support.packers import gptq, store
from tests.support.peft_adapters import make_adapter
from tests.support.rank_requests import check_streams
from tests.support.rank_weights import check_weights
from tests.support.served import serving
from tests.support.speculation import AnyLength, speculating
from tests.support.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # within PEFT
]

FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="fewer than four GPUs")
DEVICE = "cuda"
OPTIONS: dict[str, Any] = rank_requests.OPTIONS | {"device": DEVICE, "threads": None}
PROCESSED = OPTIONS | {"logits_processors": rank_requests.ALL["logits_processors"]}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[1 + number % 3, *range(4, 4 + 3 * number), 7] for number in range(12)]
"""Of few tokens and of many; some are computed in several steps."""


def said(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(packages: None) -> list[list[list[int]]]:
    with LLM(**PROCESSED) as alone:
        return said(rank_requests.answers(alone))


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "cuda_graphs": False},
        {"tensor_parallel_size": 2, "overlap": False},
        {"tensor_parallel_size": 2, "triton_kernels": False},
        {"tensor_parallel_size": 2, "deterministic": True},
        {"tensor_parallel_size": 2, "target_itl": "1s"},
        {"tensor_parallel_size": 2, "proposer": "ngram"},
        {"tensor_parallel_size": 2, "kv_tier": ("host:64MB",)},
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 2, "overlap": False},
        {"pipeline_parallel_size": 2, "cuda_graphs": False},
        {"pipeline_parallel_size": 2, "proposer": "ngram"},
        pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=FOUR),
        {"data_parallel_size": 2},
    ],
    ids=str,
)
def test_two_gpus_answer_as_one_does(options: dict[str, Any], expected: list[list[list[int]]]) -> None:
    with LLM(**PROCESSED | options) as llm:
        assert said(rank_requests.answers(llm)) == expected


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=FOUR)])
def test_every_rank_of_a_stage_replays_its_decodes(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = OPTIONS | {"model": str(make_checkpoint("llama3", tmp_path / "model")), "max_model_len": 64}
    with LLM(**options) as alone:
        expected = said(alone.generate(PROMPTS, GREEDY))
    file = noted_replays.note(monkeypatch, tmp_path)
    with LLM(**options, tensor_parallel_size=size, pipeline_parallel_size=2) as llm:
        assert said(llm.generate(PROMPTS, GREEDY)) == expected
    replays = noted_replays.replays_in(file)
    assert replays == replays[:1] * 2 * size
    assert len(replays[0]) >= 24, "as many steps as the tokens of an answer"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_sum(
    way: Way, deterministic: bool, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank says which, as if it knew from an earlier start."""
    ways = [way] * len(TIMED_ROWS)
    monkeypatch.setattr(rank_sums, "known_ways", lambda *_: ways)
    with LLM(**PROCESSED, tensor_parallel_size=2, deterministic=deterministic) as llm:
        assert said(rank_requests.answers(llm)) == expected
        peers = cast("Any", llm)._engine.core.executor._worker._ranks.peers
        assert peers is None if way == "nccl" else peers.ways == ways


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama_bias", "qwen2_moe", "gemma2"])
def test_each_way_to_sum_of_a_family(family: str, way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(family, tmp_path)
    monkeypatch.setattr(rank_sums, "known_ways", lambda *_: [way] * len(TIMED_ROWS))
    options = OPTIONS | {"model": str(folder), "max_model_len": 64}
    found = []
    for size in (1, 2):
        with LLM(**options, tensor_parallel_size=size) as llm:
            found.append(said(llm.generate(PROMPTS, GREEDY)))
    assert found[1] == found[0]


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize(
    "family", [family for family in TENSOR_PARALLEL_FAMILIES if family not in CPU_ALONE and family != "gemma3n"]
)
def test_kinds_of_layers(family: str, size: str, tmp_path: Path) -> None:
    changes = TENSOR_PARALLEL_CHANGES if size == "tensor_parallel_size" else STAGE_CHANGES
    folder = make_checkpoint(family, tmp_path, **changes.get(family, {}))
    options = OPTIONS | {"model": str(folder), "max_model_len": 64}
    found = []
    for changed in ({}, {size: 2}):
        with LLM(**options | changed) as llm:
            found.append(said(llm.generate(PROMPTS, GREEDY)))
    assert found[1] == found[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_expert_parallel": True},
        {"enable_expert_parallel": True, "redundant_experts": 2, "rebalance_experts": "1ms"},
        pytest.param(
            {"pipeline_parallel_size": 2, "enable_expert_parallel": True, "rebalance_experts": "1ms"}, marks=FOUR
        ),
        {"enable_dp_attention": True},
        {"enable_dp_attention": True, "enable_expert_parallel": True},
        {"enable_dp_attention": True, "cuda_graphs": False},
        {"enable_dp_attention": True, "proposer": "ngram"},
        {"enable_dp_attention": True, "enable_expert_parallel": True, "rebalance_experts": "1ms"},
    ],
    ids=str,
)
def test_experts_are_shared_in_all_ways(options: dict[str, Any], tmp_path: Path) -> None:
    folder = str(make_checkpoint("mixtral", tmp_path))
    given = expert_requests.OPTIONS | {"device": DEVICE, "threads": None}
    with LLM(folder, **given) as alone:
        expected = expert_requests.answers(alone)
    with LLM(folder, tensor_parallel_size=2, **given | options) as ranked:
        assert [expert_requests.answers(ranked) for _ in range(3)] == [expected] * 3


def test_stages_tell_what_all_of_them_have_counted(tmp_path: Path) -> None:
    given = expert_requests.OPTIONS | {"device": DEVICE, "threads": None, "pipeline_parallel_size": 2}
    with LLM(str(make_checkpoint("mixtral", tmp_path)), **given) as llm:
        expert_requests.answers(llm)
        first, second, last = map(sum, llm.expert_tokens())
        assert min(first, second) >= 2 * llm.statistics().computed_tokens, "and rows that fill graphs up"
        assert 0 < last <= max(first, second)


def test_packed_weights_adapters_and_codes_of_keys(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = {name: make_adapter(tiny_model, tmp_path / name, seed, r=4) for seed, name in enumerate(("one", "two"))}
    packed = store(tiny_model, tmp_path, gptq, LINEAR, GPTQ).quantized
    given = {"device": DEVICE, "threads": None, "kv_cache_dtype": "fp8", "max_adapters": 1}
    check_weights(packed, adapters, **given)
    assert "do not work here" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *((kind, "tensor_parallel_size") for kind in HEAD_KINDS),
        *((kind, "pipeline_parallel_size") for kind in (*HEAD_KINDS, "mtp")),
    ],
)
def test_heads_draft_as_on_one_gpu(kind: str, size: str, tmp_path: Path) -> None:
    if kind == "mtp":
        target, draft = make_model_with_layer("glm4_moe", tmp_path / "target"), "mtp"
    else:
        target, draft = make_tiny_model(tmp_path / "target"), str(tmp_path / "head")
        write_head(kind, tmp_path / "head", target)
    options = OPTIONS | {"model": str(target), "draft_model": draft, "max_model_len": 64}
    found = []
    for ranks in (1, 2):
        with LLM(**options | {size: ranks}) as llm, drafting(llm, 3) as drafts:
            found.append((said(llm.generate(PROMPTS, GREEDY)), len(drafts) > 0))
    assert found == [(found[0][0], True)] * 2


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_model_behind_the_last_stage_guesses_for_itself(cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all drafts are right, as few are where sums are rounded otherwise; and they are made in graphs."""
    options = OPTIONS | {"cuda_graphs": cuda_graphs}
    with LLM(**options) as alone:
        expected = said(alone.generate(PROMPTS, GREEDY))
    replay, replayed = DraftGraphs._replay, [True][:0]

    def noted(graphs: DraftGraphs, run: DraftRun, steps: DraftSteps) -> None:
        replayed.append(run in graphs.captured)
        replay(graphs, steps, run)

    monkeypatch.setattr(DraftGraphs, "_replay", noted)
    with LLM(**options, draft_model=OPTIONS["model"], pipeline_parallel_size=2) as llm:
        core: Any = cast("Any", llm)._engine.core
        core.drafting = AnyLength(None, vocab_size_of(llm), 5)
        assert said(llm.generate(PROMPTS, GREEDY)) == expected
        found = llm.statistics()
        core.scheduler.check_integrity()
    assert found.accepted_tokens > 0.9 * found.draft_tokens > 90
    assert any(replayed) == cuda_graphs


@pytest.mark.parametrize("guessed_there", [False, True])
@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid", "lfm2"])
def test_states_of_both_stages_see_the_drafts_that_are_kept(family: str, guessed_there: bool, tmp_path: Path) -> None:
    """Gated delta nets, Mamba-2 and short convolutions; requests give way and begin again, and conversations go on."""
    folder = make_checkpoint(family, tmp_path, **STAGE_CHANGES[family])
    options = OPTIONS | {"model": str(folder), "max_model_len": 96}
    with LLM(**options) as alone:
        expected = alone.generate(PROMPTS, GREEDY)
        longer = [[*prompt, *output.outputs[0].token_ids, 50] for prompt, output in zip(PROMPTS, expected, strict=True)]
        again = said(alone.generate(longer, GREEDY))
    with LLM(**options | {"kv_cache_tokens": 192}, pipeline_parallel_size=2) as llm:
        for accuracy in (0.0, 0.7, 0.7):
            with speculating(llm, expected, accuracy, on_device=guessed_there):
                assert said(llm.generate(PROMPTS, GREEDY)) == said(expected)
                found = llm.statistics()
        assert said(llm.generate(longer, GREEDY)) == again
        assert is_idle(llm)
    assert 0 < found.accepted_tokens < found.draft_tokens
    assert found.preemptions


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two ranks each has 69 million weights of a layer: steps of 5,790 rows are computed in halves."""
    sizes = {"hidden_size": 2048, "intermediate_size": 20480, "num_attention_heads": 16, "num_key_value_heads": 8}
    others = {"max_position_embeddings": 8192, "initializer_range": 0.02, "num_hidden_layers": 2}
    return make_checkpoint("llama", tmp_path_factory.mktemp("wide"), **sizes, **others)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_long_prompts_in_halves(
    quantization: Literal["fp8"] | None, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one GPU answers; codes, whose scales are of a rank's share, as two do in steps that are computed whole."""
    halved, rows = FusedLayer.in_halves, [0][:0]

    def noted(self: FusedLayer, hidden: torch.Tensor, *given: Any) -> Any:
        rows.append(hidden.shape[0])
        return halved(self, hidden, *given)

    monkeypatch.setattr(FusedLayer, "in_halves", noted)
    monkeypatch.setattr(rank_sums, "known_ways", lambda *_: ["whole"] * len(TIMED_ROWS))
    options = {"dtype": "bfloat16" if quantization else "float32", "quantization": quantization, "device": DEVICE}
    options |= {"model": str(wide), "max_model_len": 8192, "max_batch_requests": 8, "kv_cache_tokens": 32768}
    other = {"tensor_parallel_size": 2, "max_batch_tokens": 2048} if quantization else {}
    prompt = [3 + number * number % 120 for number in range(7001)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    found = []
    for divided in (other, {"tensor_parallel_size": 2, "max_batch_tokens": 8192}):
        assert not rows
        with LLM(**options | divided) as llm:
            [output] = llm.generate([prompt], params)
        entries = [next(iter(entry.values())).logprob for entry in (output.prompt_logprobs or []) if entry]
        found.append((output.outputs[0].token_ids, torch.tensor(entries)))
    assert rows and min(rows) > 5790
    (tokens, expected), (others, logprobs) = found
    assert len(logprobs) == 7000
    if quantization is None:
        assert others == tokens and (logprobs - expected).abs().max() < 2e-3
    else:
        assert (logprobs - expected).abs().mean() < 0.02


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="not Hopper")
def test_single_rows_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of products of 8192 outputs: the same tokens are scored as on one GPU, one after another."""
    from kvern.kernels.stream_hopper import stream_product

    streamed = set[tuple[int, int]]()

    def noted(x: torch.Tensor, weight: torch.Tensor, bias: Any, shape: StreamShape, *given: Any) -> torch.Tensor:
        streamed.add((x.shape[0], shape.splits))
        return stream_product(x, weight, bias, shape, *given)

    monkeypatch.setattr(tuned_linear, "stream_product", noted)
    sizes = {"hidden_size": 8192, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 8}
    model = make_checkpoint("llama", tmp_path, **sizes, head_dim=128, num_hidden_layers=1, initializer_range=0.02)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, allowed_token_ids=[7], logprobs=0)
    found = []
    for size in (1, 2):
        with LLM(str(model), device=DEVICE, dtype="bfloat16", tensor_parallel_size=size, kv_cache_tokens=4096) as llm:
            [output] = llm.generate([[1, *range(4, 40)]], params)
        found.append(torch.tensor([entry[7].logprob for entry in output.outputs[0].logprobs or []]))
        assert ({(1, 1), (1, 2)} <= streamed) == (size == 2)
    assert len(found[0]) == 16 and (found[0] - found[1]).abs().max() < 0.05


@pytest.mark.parametrize("option", ["-tp", "-pp"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_when_a_rank_ends_or_hangs(how: signal.Signals, option: str) -> None:
    check_streams(how, option, DEVICE, "20", 1900, ["--no-cuda-graphs", "--no-overlap"])


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_hangs_keeps_no_llm_waiting(how: signal.Signals, sizes: dict[str, int]) -> None:
    """The process that has it can have another afterwards."""
    before = rank_requests.ranks_of(os.getpid())
    for lost in (True, False):
        with LLM(**OPTIONS | sizes | {"engine_timeout": 20.0}) as llm:
            [output] = llm.generate([PROMPTS[1]], GREEDY)
            (rank,) = set(rank_requests.ranks_of(os.getpid())) - set(before)
            if lost:
                threading.Timer(0.5, os.kill, (rank, how)).start()
                with pytest.raises(EngineDied, match=r"it lost (rank [01], which .* SIGKILL|its other ranks)"):
                    llm.generate(PROMPTS * 1000, GREEDY)  # more than are done by then
            else:
                assert len(output.outputs[0].token_ids) == 24


def test_a_server_without_options_takes_both_gpus() -> None:
    with serving("kvern-12m", "--max-model-len", "512", "--kv-cache-tokens", "8192") as served:
        said = served.client().completions.create(prompt="Once", model="kvern-12m", max_tokens=4, temperature=0)
        assert said.usage is not None and said.usage.completion_tokens == 4
    assert "kvern: 2 x " in served.said and "(-tp, -pp and -dp say it otherwise)" in served.said
