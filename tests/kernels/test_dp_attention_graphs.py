"""Ranks in DP attention replay steps of one size together; kernels and replays are interpreted here."""

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import kvern.runner.device_runner
import kvern.runner.prompt_graphs
import kvern.runner.worker
from kvern import LLM, EngineConfig, SamplingParams
from kvern.engine.factory import make_rank_core
from kvern.models.loader import read_config
from kvern.models.registry import spec_from_config
from kvern.ranks.ranks import DPAttention, Ranks
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from kvern.runner.decode_graphs import DecodeKind
from kvern.runner.device_runner import DeviceRunner
from kvern.runner.plan import agree, lay_out
from kvern.runner.prompt_graphs import PromptKind
from kvern.runner.ranks.rank_executors import DPAttentionExecutor
from kvern.runner.ranks.rank_wire import TakeTurn
from kvern.runner.startup import Startup
from kvern.runner.step_graphs import PlannedStep
from kvern.runner.worker import Worker
from kvern.serving.dp_attention import take_turn
from tests.support.families import make_checkpoint
from tests.support.kernel_list import KERNELS
from tests.support.kernels.device_engines import OPTIONS
from tests.support.kernels.rank_turns import CPU, SECONDS
from tests.support.kernels.repeated_graphs import RecordedGraphs, RepeatedSteps
from tests.support.peft_adapters import ATTENTION, make_adapter
from tests.support.speculation import AnyLength, Remembered

pytestmark = [
    pytest.mark.usefixtures("few_products"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="no graphs"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # within PEFT
]
TOKENS = 4
PROMPTS = [[[5, 9, 17, 33, 2], [3, 1, 4], [7, 8], [6, 5, 4]], [[100, 101]]]
"""Those of each rank, which has other numbers of decodes in most steps."""
LATE = 14
"""The first rank gets its last prompt in this turn, when the other has long ended."""


class Baton(Ranks):
    """A thread of several, of which one runs at a time but while it waits: Triton's interpreter knows no threads."""

    def __init__(self, rank: int, size: int, turn: threading.Lock) -> None:
        super().__init__(rank, size)
        self._turn = turn

    def _waiting(self, call: Callable[..., Any], *given: Any) -> Any:
        self._turn.release()
        try:
            return call(*given)
        finally:
            self._turn.acquire()

    def numbers(self, *numbers: int) -> list[list[int]]:
        found: list[list[int]] = self._waiting(super().numbers, *numbers)
        return found

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._waiting(super().gather, x)
        return found

    def sum_scattered(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._waiting(super().sum_scattered, x)
        return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of a model; engines made now have their batch on the device, and capture steps."""
    groups = frozenset(kernel.group for kernel in KERNELS if not kernel.group.startswith("hopper"))
    monkeypatch.setattr(kvern.runner.worker, "usable_kernels", lambda *_: (groups, groups))
    monkeypatch.setattr(kvern.runner.prompt_graphs, "DECODES", (4,))
    monkeypatch.setattr(kvern.runner.prompt_graphs, "TOKENS", (6,))
    return make_checkpoint("qwen3_moe", tmp_path)


Asked = Mapping[int, Sequence[RequestSpec]]
"""What a rank gets in which of its turns."""
Answers = dict[str, list[int]]
Replayed = list[tuple[int, int]]
GREEDY = ResolvedParams(temperature=0.0)


def run_rank(
    folder: Path,
    rank: int,
    turn: threading.Lock,
    asked: Asked,
    texts: Sequence[list[int]],
    adapter: Path | None,
    draft: Path | None,
) -> tuple[Answers, Replayed, Replayed]:
    """The answers of a rank's own requests, and what it has replayed: of decodes, and with prompts.

    `texts`: that it guesses answers to be, or what a model in the folder `draft` does. `adapter`: that requests may use
    as number 1.
    """
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_dp_attention": True, "device": "cpu"}
    config = EngineConfig(model=str(folder), max_batch_tokens=6, max_adapters=adapter and 1, **OPTIONS | options)
    dp_attention = DPAttention(Baton(rank, 2, turn))
    ranks = Ranks(dp_attention=dp_attention)
    with turn:
        spec = spec_from_config(read_config(folder))
        worker = Worker(config, folder, spec, CPU, Startup(), draft, ranks)
        plan = agree([worker.probe()], config, spec)
    ranks.connect(folder / "meeting", CPU, SECONDS)
    with turn:
        layout = lay_out([worker.load(plan)], plan, config)
        worker.build(layout)
        runner: Any = worker.runner
        assert isinstance(runner, DeviceRunner)

        def capture_again() -> None:
            dp_attention._counts, dp_attention._places = [], None  # as it was captured

        kinds = DecodeKind(runner.model, 0), PromptKind(runner.model, 10)
        decodes, mixed = (RecordedGraphs(kind, RepeatedSteps(capture_again)) for kind in kinds)
        runner.graphs = [decodes, mixed]
        executor = DPAttentionExecutor(worker, dp_attention, None, None)
        core = make_rank_core(config, folder, layout, executor, None)
        if adapter is not None:
            core.add_adapter(1, core.read_adapter(str(adapter)))
        if texts:
            proposer = Remembered(texts) if draft is None else None
            core.drafting = AnyLength(proposer, spec.vocab_size, 2)
        answers: Answers = {}
        for number in range(2 * LATE):
            for event in take_turn(core, executor, TakeTurn([(added, []) for added in asked.get(number, [])])):
                answers.setdefault(event.request_id, []).extend(event.token_ids)
        assert not core.has_work
        verified = sum(core.statistics().drafts_by_position)
        uncertain = any(step.uncertain for step in decodes.used)
        assert bool(verified) == uncertain == bool(texts), "rows go on in graphs after drafts"
    sizes = [shape.size for shape in decodes.memory.replayed]
    replayed = [*zip(sizes, (len(step.scheduled) for step in decodes.used), strict=True)]
    return answers, replayed, [tokens_of(step) for step in mixed.used]


def tokens_of(step: PlannedStep) -> tuple[int, int]:
    """How many decodes of its own a rank has in a step, and tokens of prompts."""
    decodes = sum(item.count == 1 for item in step.scheduled)
    return decodes, sum(item.count for item in step.scheduled) - decodes


def run_ranks(
    folder: Path,
    asked: Sequence[Asked],
    texts: Sequence[list[int]] = (),
    adapter: Path | None = None,
    draft: Path | None = None,
) -> list[tuple[Answers, Replayed, Replayed]]:
    """As `run_rank`, of each rank, of which the first has `texts`."""
    turn = threading.Lock()
    with ThreadPoolExecutor(len(asked)) as threads:
        ranks = [(rank, turn, own, () if rank else texts, adapter, draft) for rank, own in enumerate(asked)]
        return list(threads.map(lambda given: run_rank(folder, *given), ranks))


@pytest.mark.nightly
@pytest.mark.parametrize("beside", ["nothing", "drafts", "drafts of a model", "adapter"])
def test_ranks_replay_steps_of_one_size_together(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    """With drafts, or an adapter, of the first rank some steps are none: all ranks launch kernels together."""
    adapter = make_adapter(folder, tmp_path / "adapter", 1, target_modules=ATTENTION) if beside == "adapter" else None
    alone = LLM(str(folder), device="cpu", **OPTIONS, adapters={} if adapter is None else {"one": str(adapter)})
    prompts = [prompt for own in PROMPTS for prompt in own]
    lengths = [TOKENS + number for own in PROMPTS for number in range(len(own))]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    used = [None if adapter is None or rank else "one" for rank, own in enumerate(PROMPTS) for _ in own]
    expected = [output.outputs[0].token_ids for output in alone.generate(prompts, params, adapter=used)]
    key = None if adapter is None else 1
    specs = [
        [
            RequestSpec(f"{rank}-{number}", PromptInput(prompt), GREEDY, TOKENS + number, adapter=None if rank else key)
            for number, prompt in enumerate(own)
        ]
        for rank, own in enumerate(PROMPTS)
    ]
    draft = shutil.copytree(folder, tmp_path / "draft") if beside == "drafts of a model" else None
    texts = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)] if "drafts" in beside else []
    if beside == "nothing":
        monkeypatch.setattr(kvern.runner.device_runner, "build_device_batch", None)  # no step is launched by kernels
    first, second = run_ranks(folder, [{0: own[:3], LATE: own[3:]} for own in specs], texts, adapter, draft)
    assert [*first[0].values(), *second[0].values()] == expected
    assert [size for size, _ in first[1]] == [size for size, _ in second[1]]
    if beside != "nothing":
        assert first[1], "decodes are replayed"
        return
    counts = {count for _, count in second[1]}
    assert {0, 1} <= counts, "the other has fewer rows, in some steps none"
    prompts_of_one = {(own[1] > 0, other) for own, other in zip(first[2], second[2], strict=True)}
    assert {(True, (0, 2)), (True, (1, 0)), (True, (0, 0))} <= prompts_of_one, "it has a prompt, a decode, or nothing"


@pytest.mark.nightly
def test_a_search_forks_beside_prompts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks agree on a graph before the step begins in which a beam gets its row."""
    alone = LLM(str(folder), device="cpu", **OPTIONS)
    prompts, late = [[5, 9, 17], [7, 8]], (1, 2)
    params = [
        SamplingParams(beam_width=2, n=2, max_tokens=TOKENS, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
    ]
    searched, short = ([answer.token_ids for answer in one.outputs] for one in alone.generate(prompts, params))
    search = RequestSpec("search", PromptInput(prompts[0]), params[0].resolved(), TOKENS)
    asked = {turn: [RequestSpec(f"late-{turn}", PromptInput(prompts[1]), GREEDY, 1)] for turn in late}
    monkeypatch.setattr(kvern.runner.device_runner, "build_device_batch", None)
    (answers, _, replayed), _ = run_ranks(folder, [{0: [search]} | asked, {}])
    assert [answers[f"search#{index}"] for index in range(2)] == searched
    assert [answers[f"late-{turn}#0"] for turn in late] == [*short] * len(late)
    assert (2, 2) in replayed, "both beams and a prompt"
