"""The time of parts and layers in one step of so many: whose it is, and that answers do not know of it."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from kvern import LLM, EngineConfig, SamplingParams
from kvern.cpu.capture import Program
from kvern.device import marks
from kvern.engine.layer_seconds import MOST_LOADS, LayerSeconds
from kvern.engine.step_load import StepLoad
from kvern.errors import ConfigError
from kvern.models.registry import spec_from_config
from kvern.observe.metrics import Metrics
from kvern.observe.step_parts import RECENT, StepParts
from kvern.planning.estimate import Model, PartBounds, Split
from kvern.planning.hardware import Card
from kvern.request.layer_times import LayerTimes, MeasuredStep, StepTimes
from kvern.runner.layer_times import StepClock
from tests.support.cache_folder import cache_folder, load_kernels, pretend_tiles
from tests.support.encoders import make_encoder
from tests.support.families import make_checkpoint, make_config
from tests.support.internals import core_of, worker_of
from tests.support.outputs import token_ids

PROMPTS = [[5, 6, 7], [8], list(range(20, 60))]
LENGTH = 12
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=LENGTH, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "max_model_len": 128}


def times_of(llm: LLM) -> LayerTimes:
    core = core_of(llm)
    core._layers._is_told = False
    times: LayerTimes = core.layer_times()
    return times


def with_ticks(llm: LLM) -> None:
    """Lets each look at the clock of the steps be a second later than the last."""
    ticks = itertools.count(0, 10**9)
    worker_of(llm).times._clock = lambda: next(ticks)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "qwen3_5"])
def test_each_part_has_its_time_and_answers_are_the_same(family: str, tmp_path: Path) -> None:
    folder = str(make_checkpoint(family, tmp_path))
    expected = token_ids(LLM(folder, **OPTIONS, cpu_kernels=False).generate(PROMPTS, PARAMS))
    llm = LLM(folder, **OPTIONS, cpu_kernels=False, trace_layers=1)
    with_ticks(llm)
    assert token_ids(llm.generate(PROMPTS, PARAMS)) == expected
    decode, prompt = (times_of(llm)[kind] for kind in ("decode", "prompt"))
    assert prompt.steps + decode.steps == llm.statistics().steps
    assert decode.steps == LENGTH - 1
    mixers = {"llama": {"attention"}, "qwen3_5": {"attention", "recurrent"}, "gemma3": {"attention", "window"}}
    whole = {"other", "embedding", "head", "sampling", "experts" if family == "qwen3_moe" else "mlp"}
    layers = len(core_of(llm)._layers._names)
    for times in (decode, prompt):
        found = {part: seconds for part, (seconds, _) in times.parts.items()}
        assert whole | mixers.get(family, {"attention"}) <= found.keys()
        assert times.layers == [2.0 * times.steps] * layers, "a mark at its mixer, and one at its MLP"
        of_layers = found.keys() & {"attention", "window", "recurrent", "mlp", "experts"}
        assert sum(found[part] for part in of_layers) == sum(times.layers)


def test_captured_decodes_are_measured_as_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that repeats calls takes the time at the places that were marked during the capture."""
    load_kernels("cpu_sampling", 1)
    pretend_tiles(monkeypatch, there=False)
    timed: list[Sequence[int]] = []
    run_timed = Program.run_timed

    def noted(program: Program, first: int, last: int) -> Any:
        results, codes, times = run_timed(program, first, last)
        assert times == sorted(times) and len(times) == len(codes)
        timed.append(codes)
        return results, codes, times

    monkeypatch.setattr(Program, "run_timed", noted)
    folder = str(make_checkpoint("llama", tmp_path / "model"))
    options = OPTIONS | {"cache_dir": cache_folder(tmp_path / "cache")}
    expected = token_ids(LLM(folder, **options).generate(PROMPTS, PARAMS))
    assert not timed
    llm = LLM(folder, **options, trace_layers=3)
    assert token_ids(llm.generate(PROMPTS, PARAMS)) == expected
    of_layer = [(1 + layer) * len(marks.PARTS) + part for layer in range(3) for part in (marks.MIXER, marks.MLP)]
    in_order = [marks.EMBEDDING, *of_layer, marks.HEAD, marks.SAMPLING, marks.OTHER]
    assert 3 <= len(timed) <= 4 and all([*codes] == in_order for codes in timed)
    decode = times_of(llm)["decode"]
    assert decode.rows == 3 * decode.steps and all(seconds > 0 for seconds in decode.layers)


def test_a_step_that_captures_says_nothing_about_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_kernels("cpu_sampling", 1)
    pretend_tiles(monkeypatch, there=False)
    folder, cache = str(make_checkpoint("llama", tmp_path / "model")), cache_folder(tmp_path / "cache")
    llm = LLM(folder, **OPTIONS, cache_dir=cache, trace_layers=1)
    for _ in range(2):
        llm.generate(PROMPTS, PARAMS)
        assert sum(times.steps for times in times_of(llm).values()) == llm.statistics().steps - 1


def test_drafts_are_a_part_and_the_layers_are_those_of_the_model(tmp_path: Path) -> None:
    folder, draft = (str(make_checkpoint("llama", tmp_path / name)) for name in ("model", "draft"))
    llm = LLM(folder, **OPTIONS, cpu_kernels=False, trace_layers=1, draft_model=draft)
    with_ticks(llm)
    llm.generate(PROMPTS, PARAMS)
    times = times_of(llm)["decode"]
    assert times.layers == [2.0 * times.steps] * 3
    assert times.parts["drafting"][0] > 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_and_stages(options: dict[str, Any], tmp_path: Path) -> None:
    """Ranks wait for each other in a part of its own; each stage measures its layers."""
    folder = str(make_checkpoint("llama", tmp_path, num_hidden_layers=4))
    expected = token_ids(LLM(folder, **OPTIONS).generate(PROMPTS, PARAMS))
    llm = LLM(folder, **OPTIONS, **options, trace_layers=2)
    for _ in range(2):  # by then what the first stage has measured of the first has come
        assert token_ids(llm.generate(PROMPTS, PARAMS)) == expected
    decode = times_of(llm)["decode"]
    assert decode.steps and all(seconds > 0 for seconds in decode.layers) and len(decode.layers) == 4
    assert ("collectives" in decode.parts) == ("tensor_parallel_size" in options)
    assert {"embedding", "head", "sampling"} <= decode.parts.keys()


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("bert", {}, "is an encoder"),
        ("llama", {"model_implementation": "transformers"}, "transformers computes llama"),
        ("qwen3_moe", {"tensor_parallel_size": 2, "enable_dp_attention": True}, "each rank computes other steps"),
    ],
)
def test_what_cannot_be_measured_is_refused(family: str, options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = str((make_encoder if family == "bert" else make_checkpoint)(family, tmp_path))
    with pytest.raises(ConfigError, match=f"trace_layers is 7, and .*{reason}.*: leave it out"):
        LLM(folder, device="cpu", trace_layers=7, **options)
    with pytest.raises(ConfigError, match="trace_layers is 0: it must be at least 1"):
        EngineConfig(folder, trace_layers=0)


def test_a_profile_is_not_measured() -> None:
    class Output:
        step = 4
        scheduled = (1,)

    clock, output = StepClock(4), Output()
    for listener in (None, marks.Marks(lambda code: None)):
        with marks.listened(listener):
            assert clock.is_due(output)  # type: ignore[arg-type]
            with clock.of_host(output):  # type: ignore[arg-type]
                assert marks.listener() is not None
                marks.begin(marks.HEAD)
            assert len(clock.take()) == (listener is None)
    output.step = 5
    assert not clock.is_due(output)  # type: ignore[arg-type]


CARD = Card("card", 1e9, 1e9, 1e12, 1e12)


def seconds_of_steps(every: int = 2) -> LayerSeconds:
    return LayerSeconds(every, spec_from_config(make_config("qwen3_moe").to_dict()))


def test_times_that_come_late_or_of_stages_belong_to_their_step() -> None:
    seconds = seconds_of_steps()
    for step in range(1, 9):
        seconds.began(step, StepLoad(rows=step))
    layer = len(marks.PARTS)
    seconds.ended([MeasuredStep(4, {2 * layer + marks.MIXER: 1.0, marks.EMBEDDING: 0.5}, is_whole=False)])
    seconds.ended([MeasuredStep(2, {marks.HEAD: 2.0}), MeasuredStep(4, {layer + marks.MLP: 0.25, marks.HEAD: 1.0})])
    times = seconds.report()["decode"]
    assert (times.steps, times.rows) == (2, 6)
    assert {part: found[0] for part, found in times.parts.items()} | {"mlp": 0.0, "experts": 0.0} == {
        "attention": 1.0,
        "embedding": 0.5,
        "head": 3.0,
        "mlp": 0.0,
        "experts": 0.0,
    }
    assert times.layers[:2] == [0.25, 1.0]
    assert seconds.report() == {}, "nothing is new"
    seconds.forget()
    seconds.ended([MeasuredStep(6, {marks.HEAD: 9.0})])
    assert seconds.report() == {}, "that step was lost"
    for step in range(2, 2 * MOST_LOADS + 4, 2):
        seconds.began(step, StepLoad(rows=1, prompt=1))
    assert len(seconds._loads) == MOST_LOADS


def test_bounds_are_of_the_bytes_that_a_part_reads(tmp_path: Path) -> None:
    from kvern.planning.choice import model_of

    model: Model = model_of(EngineConfig(), make_checkpoint("llama", tmp_path))
    bounds = PartBounds(model, CARD, Split(1, 1), model.token_bytes)
    one, context = bounds.least(1, 0, 1, 0.0), bounds.least(1, 0, 1001, 0.0)
    weights = sum(share.nbytes for share in model.shares if share.kind.startswith("MLP"))
    assert one["mlp"] == pytest.approx(weights / CARD.bandwidth)
    assert context["attention"] - one["attention"] == pytest.approx(1000 * model.token_bytes / CARD.bandwidth)
    assert context["mlp"] == one["mlp"] and "collectives" not in one
    many = bounds.least(10**6, 10**6, 0, 0.0)
    parameters = sum(share.parameters for share in model.shares if share.kind.startswith("MLP"))
    assert many["mlp"] == pytest.approx(2e6 * parameters / CARD.rate), "products take longer than reading"
    assert many["head"] == one["head"], "of a prompt one token is sampled from"
    seconds = LayerSeconds(1, model.spec)
    seconds.divide(bounds)
    seconds.began(1, StepLoad(rows=1, keys=1))
    seconds.ended([MeasuredStep(1, {marks.OTHER: 1.0})])
    assert seconds.report()["decode"].parts == {"other": (1.0, 0.0)} | {
        part: (0.0, least) for part, least in one.items()
    }


def test_tables_are_about_the_last_steps_and_counters_about_all() -> None:
    metrics = Metrics("m")
    parts: StepParts = metrics.layers
    assert parts.recent() == [] and b"layer" not in generate_latest(metrics.registry)
    for count in range(1, RECENT + 3):
        slow = 9.0 if count > 1 else 0.0  # the first step was slow, and is forgotten by the table
        parts.hear(
            {
                "decode": StepTimes(
                    count, 3 * count, {"mlp": (count + 9.0, 0.5 * count), "head": (slow, 0.0)}, [1.0 * count]
                )
            }
        )
    [told] = parts.recent()
    assert (told["step"], told["measured"], told["tokens"], told["seconds"]) == ("decode", RECENT, 3.0, 1.0)
    assert told["layers"] == [1.0]
    assert told["parts"] == [
        {"part": "mlp", "seconds": 1.0, "share": 1.0, "bound_seconds": 0.5},
        {"part": "head", "seconds": 0.0, "share": 0.0, "bound_seconds": None},
    ]
    parts.restarted()
    assert parts.recent() == []
    parts.hear({"prompt": StepTimes(1, 5, {"mlp": (2.0, 0.0)}, [2.0])})
    text = generate_latest(metrics.registry).decode()
    assert f'kvern:layer_steps_total{{model_name="m",step="decode"}} {RECENT + 2}.0' in text
    assert f'kvern:layer_seconds_total{{model_name="m",part="mlp",step="decode"}} {RECENT + 11}.0' in text
    assert 'kvern:layer_seconds_total{model_name="m",part="mlp",step="prompt"} 2.0' in text
    assert 'kvern:layer_bound_seconds_total{model_name="m",part="mlp",step="prompt"}' not in text
