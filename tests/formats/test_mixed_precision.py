"""Mixed precision: what each layer costs in each precision, the best assignment, and the report."""

import itertools
import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern import LLM, SamplingParams
from kvern.cli.main import main
from kvern.errors import ConfigError
from kvern.formats.scaled import Rounding, rounded
from kvern.models.loader import load_model
from kvern.quantize import mixed, mixed_report, sensitivity
from kvern.quantize.blocks import Walk
from kvern.quantize.calibration import Calibration
from kvern.quantize.checkpoint import Checkpoint
from kvern.quantize.job import make_method
from kvern.quantize.mixed import PAGE_NAME, Budget, Mixture, plan_of
from kvern.quantize.mixed_report import Choice, MixedReport, Unit, frontier, read_report
from kvern.quantize.report_page import page
from kvern.quantize.scheme import FP8, fit, int4
from kvern.quantize.sensitivity import groups_of, measure
from kvern.quantize.statistics import REPORT_NAME
from tests.support.families import make_checkpoint
from tests.support.model_outputs import logits
from tests.support.tiny_model import make_tiny_model

CPU = torch.device("cpu")
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
"""Sizes that some groups divide and others do not."""
ROWS = torch.randint(3, 131, (2, 24), generator=torch.Generator().manual_seed(3))


def random_units(seed: int, units: int, choices: int = 4) -> list[list[Choice]]:
    draw = random.Random(seed)
    return [
        [
            Choice(draw.randint(1, 30) * draw.choice([1, 7]), draw.choice([0.0, 1.0, draw.random()]))
            for _ in range(choices)
        ]
        for _ in range(units)
    ]


def totals(units: list[list[Choice]], chosen: list[int]) -> Choice:
    picked = [choices[index] for choices, index in zip(units, chosen, strict=True)]
    return Choice(sum(choice.size for choice in picked), sum(choice.loss for choice in picked))


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(20))
def test_the_best_assignment_is_that_of_brute_force(seed: int) -> None:
    units = random_units(seed, units=1 + seed % 6)
    found = frontier(units)
    every = [totals(units, list(chosen)) for chosen in itertools.product(range(4), repeat=len(units))]
    for budget in sorted({choice.size for choice in every}):
        point = found.within_size(budget)
        made = totals(units, found.choices(point))
        assert made == pytest.approx((found.sizes[point], found.losses[point]))
        assert made.size <= budget
        assert made.loss == pytest.approx(min(choice.loss for choice in every if choice.size <= budget))
    for budget in sorted({choice.loss for choice in every}):
        made = totals(units, found.choices(found.within_loss(budget + 1e-9)))
        assert made.loss <= budget + 1e-6
        assert made.size == min(choice.size for choice in every if choice.loss <= budget + 1e-9)
    with pytest.raises(ConfigError, match="below the"):
        found.within_size(min(choice.size for choice in every) - 1)
    assert found.within_loss(-1.0) == len(found.sizes) - 1


@pytest.mark.parametrize("seed", range(3))
def test_with_too_many_assignments_the_answer_is_nearly_best(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    units = random_units(seed, units=40, choices=5)
    exact = frontier(units)
    monkeypatch.setattr(mixed_report, "MOST_POINTS", 80)
    thinned = frontier(units)
    assert len(thinned.sizes) <= 81 < len(exact.sizes)
    assert thinned.sizes[0] == exact.sizes[0]
    for share in (0.1, 0.3, 0.6):
        budget = exact.sizes[0] + share * (exact.sizes[-1] - exact.sizes[0])
        best, made = exact.within_size(budget), thinned.within_size(budget)
        assert totals(units, thinned.choices(made)) == pytest.approx((thinned.sizes[made], thinned.losses[made]))
        assert thinned.losses[made] <= exact.losses[exact.within_size(0.95 * budget)]
        assert thinned.losses[made] >= exact.losses[best] - 1e-9


def test_a_model_of_many_layers_is_solved() -> None:
    """Sizes as those of a large model: 200 units of six choices."""
    draw = np.random.default_rng(0)
    units = [
        [Choice(int(bits * size), float(weight * 2.0 ** (-2 * bits))) for bits in (16, 8.125, 8, 4.5, 4.25, 4.125)]
        for size, weight in zip(draw.integers(1 << 20, 1 << 27, 200), draw.random(200), strict=True)
    ]
    found = frontier(units)
    budget = 5 * sum(choices[2].size for choices in units) // 8
    point = found.within_size(budget)
    assert 0.999 * budget < found.sizes[point] <= budget


def quiet(done: int, layers: int) -> None:
    """Progress that nobody watches."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("plain") / "model", **WIDE)


@pytest.fixture(scope="module")
def measured(model: Path) -> MixedReport:
    units = measure(Walk(Checkpoint(model, CPU), ROWS), quiet)
    return MixedReport("model", "float32", tuple(units), calibration={"source": "numbers"})


@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral", "qwen2_moe", "starcoder2", "deepseek_v3", "gemma4"])
def test_every_matrix_belongs_to_one_unit(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(make_checkpoint(family, tmp_path), CPU)
    walk = Walk(checkpoint, ROWS)
    groups = [group for index in range(walk.layers) for group in groups_of(walk.block(index))]
    matrices = [piece.matrix for group in groups for piece in group.pieces]
    assert sorted(matrices) == sorted(checkpoint.matrices)
    assert sum(group.parameters for group in groups) == sum(
        piece.shape[0] * piece.shape[1] for piece in checkpoint.matrices.values()
    )
    first = {group.name.removeprefix("model.layers.0."): len(group.pieces) for group in groups if ".0." in group.name}
    together = first["self_attn.in_proj" if family == "deepseek_v3" else "self_attn.qkv_proj"]
    assert together == {"phi3": 1, "deepseek_v3": 2}.get(family, 3)
    if "mlp.experts" in first:
        assert first["mlp.experts"] % 3 == 0


def test_a_part_of_the_free_memory_of_a_gpu_limits_tokens_and_a_single_precision_takes_all_of_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(model, CPU)
    variants = len(checkpoint.spec.layers) * sensitivity.UNITS_A_LAYER
    monkeypatch.setattr(sensitivity, "HIDDEN_BYTES", 300 * variants * len(sensitivity.SCHEMES) * 4 * 64)
    assert sensitivity.tokens_for(checkpoint) == 300
    assert sensitivity.tokens_for(checkpoint, (FP8,)) == 300 * len(sensitivity.SCHEMES)
    usual = sensitivity.GPU_SHARE * sensitivity.HIDDEN_BYTES
    free = 2 * usual
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100 * usual))
    checkpoint.device = torch.device("cuda")
    assert sensitivity.tokens_for(checkpoint) == 300
    assert sensitivity.tokens_for(checkpoint, (FP8,)) == 3000
    assert sensitivity.tokens_for(checkpoint, (FP8,), memory=usual) == 1500
    assert sensitivity.tokens_for(checkpoint, memory=100 * usual) == 300
    free = 9 * usual // 10  # the card is shared
    assert sensitivity.tokens_for(checkpoint) == 270
    assert sensitivity.tokens_for(checkpoint, (FP8,), memory=usual) == 1350


def test_distributions_of_a_model_in_16_bits_are_not_rounded_to_them(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, **WIDE)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"torch_dtype": "bfloat16", "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    walk = Walk(Checkpoint(folder, CPU), ROWS)
    ends = walk.ends()
    hidden = walk.hidden.flatten(0, 1)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    expected = (ends.norm(hidden).double() @ head.double().t()).log_softmax(-1)
    found = sensitivity.log_probabilities(ends, hidden)
    assert hidden.dtype == torch.bfloat16 and found.dtype == torch.float32
    assert float((found - expected).abs().max()) < 1e-5


def test_precisions_whose_groups_do_not_divide_are_left_out(measured: MixedReport) -> None:
    shapes = {"qkv_proj": 64, "o_proj": 64, "gate_up_proj": 64, "down_proj": 128}
    for unit in measured.units:
        inputs = shapes[unit.name.rpartition(".")[2]]
        expected = {"plain", "fp8", "int8", *(f"int4-g{group}" for group in (32, 64, 128) if inputs % group == 0)}
        assert set(unit.choices) == expected
        assert unit.choices["plain"] == (32 * unit.parameters, 0.0)
        assert unit.choices["int4-g32"].size == (4 + 1) * unit.parameters  # scales of 32 bits
        assert 0 < unit.choices["int8"].loss < unit.choices["int4-g32"].loss


def test_a_loss_is_that_of_the_model_with_one_unit_rounded(model: Path, measured: MixedReport, tmp_path: Path) -> None:
    [unit] = [unit for unit in measured.units if unit.name == "model.layers.1.mlp.gate_up_proj"]
    tensors = load_file(model / "model.safetensors")
    block = Walk(Checkpoint(model, CPU), ROWS)
    block.advance(block.block(0))
    second = block.block(1)
    block.observe(second)
    for layer in unit.layers:
        name = f"{layer}.weight"
        grid = fit(tensors[name], int4(32), torch.float32, second.inputs[name].mean_squares)
        tensors[name] = grid.decode(grid.encode(tensors[name]))
    folder = make_checkpoint("llama", tmp_path, **WIDE)
    save_file(tensors, folder / "model.safetensors")
    loss = 0.0
    for ids in ROWS.tolist():
        plain, changed = (logits(load_model(path), ids).log_softmax(-1) for path in (model, folder))
        loss += float((plain.exp() * (plain - changed)).sum(-1).mean()) / len(ROWS)
    assert unit.choices["int4-g32"].loss == pytest.approx(loss, rel=1e-3)


def test_activations_are_rounded_where_the_format_rounds_them() -> None:
    x = torch.randn(5, 16)
    close = rounded(x, Rounding("int8"))
    step = x.abs().amax(-1, keepdim=True) / 127
    assert ((close - x).abs() <= step / 2 + 1e-7).all() and not torch.equal(close, x)
    assert not rounded(torch.zeros(2, 4), Rounding("int8")).any()


def calibration(model: Path) -> Calibration:
    return Calibration(ROWS, "numbers")


def mixture(model: Path) -> Mixture:
    return Mixture(Checkpoint(model, CPU), calibration(model), make_method("rtn"))


def test_a_mixture_keeps_to_its_bits(model: Path, tmp_path: Path) -> None:
    layers: list[tuple[int, int]] = []
    out = tmp_path / "out"
    made = mixture(model)
    result, report = made.make(made.measure(lambda *done: layers.append(done)), Budget(bits=7.0), out)
    assert layers == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert 6.5 < report.bits <= 7.0
    assert {unit.chosen for unit in report.units} > {"int8"}
    uniform = report.uniform()
    assert uniform["int8"][1] < report.loss < uniform["int4-g32"][1]
    stored = load_file(out / "model.safetensors")
    plan = plan_of(report)
    codes = sum(8 * tensor.nbytes for name, tensor in stored.items() if name.rpartition(".")[0] in plan)
    shapes = sum(8 * tensor.nbytes for name, tensor in stored.items() if name.endswith("weight_shape"))
    plain = sum(unit.choice.size for unit in report.units if unit.chosen == "plain")
    assert codes - shapes + plain == pytest.approx(report.bits * report.parameters)
    assert result.bits_per_weight == pytest.approx(
        (codes - shapes) / sum(unit.parameters for unit in report.units if unit.chosen != "plain"), rel=1e-3
    )
    assert report.measured["loss"] == pytest.approx(loss_of_folder(model, out), rel=1e-3)
    assert 0.3 * report.loss < report.measured["loss"] < 3 * report.loss


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_mixture_says_whether_the_largest_inputs_were_rounded_first(
    method: str, model: Path, measured: MixedReport, tmp_path: Path
) -> None:
    made = Mixture(Checkpoint(model, CPU), calibration(model), make_method(method))
    made.make(measured, Budget(bits=7.0), tmp_path / "out")
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    told = {group["weights"]["actorder"] for group in groups.values() if group["weights"]["num_bits"] == 4}
    assert told == {"weight" if method == "gptq" else None}


def loss_of_folder(model: Path, out: Path) -> float:
    losses = []
    for ids in ROWS.tolist():
        plain, changed = (logits(load_model(path), ids).log_softmax(-1) for path in (model, out))
        losses.append(float((plain.exp() * (plain - changed)).sum(-1).mean()))
    return sum(losses) / len(losses)


def test_a_mixture_keeps_to_its_loss(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed, "MOST_TRIES", 6)
    made = mixture(model)
    _, report = made.make(made.measure(), Budget(loss=0.02), tmp_path / "out")
    assert 0 < report.measured["loss"] <= np.log(1.02)
    assert report.measured["perplexity"] <= 1.02 * report.measured["plain_perplexity"]
    assert report.bits < 32


def test_the_time_is_that_of_measuring_and_of_every_attempt(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def takes(seconds: float, name: str) -> None:
        work = getattr(mixed, name)

        def done(*given: Any, **named: Any) -> Any:
            clock[0] += seconds
            return work(*given, **named)

        monkeypatch.setattr(mixed, name, done)

    takes(100, "measure")
    takes(10, "quantize")
    takes(1, "measure_folder")
    monkeypatch.setattr(mixed, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(mixed, "loss_of", lambda report: 0.7)
    made = mixture(model)
    result, report = made.make(made.measure(), Budget(loss=0.5), tmp_path / "first")
    assert result.seconds == 100 + mixed.MOST_TRIES * 11
    assert json.loads((tmp_path / "first" / REPORT_NAME).read_text())["totals"]["seconds"] == result.seconds
    assert mixture(model).make(report, None, tmp_path / "second")[0].seconds == 11


def test_a_report_can_be_edited_and_used_again(model: Path, tmp_path: Path) -> None:
    made = mixture(model)
    _, first = made.make(made.measure(), Budget(bits=7.0), tmp_path / "first")
    path = tmp_path / "first" / REPORT_NAME
    values = json.loads(path.read_text())
    told = values["mixed"]
    assert told["measured"] == first.measured and told["budget"] == {"target_bits": 7.0}
    assert {item["name"] for item in values["matrices"]} == set(plan_of(first))
    for unit in told["units"]:
        unit["chosen"] = "int8" if "mlp" in unit["name"] else "plain"
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps(values))
    _, second = mixture(model).make(read_report(edited), None, tmp_path / "second")
    assert {unit.chosen for unit in second.units if "mlp" in unit.name} == {"int8"}
    config = json.loads((tmp_path / "second" / "config.json").read_text())["quantization_config"]
    assert len(config["config_groups"]) == 1
    assert (tmp_path / "second" / PAGE_NAME).is_file()
    assert second.measured["loss"] < first.measured["loss"]
    assert second.units[0].choices == first.units[0].choices


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda told: told["units"][0].update(chosen="int3"), "chosen is 'int3', its choices are plain, fp8"),
        (lambda told: told["units"][0].pop("choices"), "lacks 'choices'"),
        (lambda told: told.update(units=7), "cannot be read as a report"),
        (lambda told: told.clear(), "lacks 'units'"),
    ],
)
def test_reports_that_cannot_be_used_are_refused(
    change: Any, message: str, measured: MixedReport, tmp_path: Path
) -> None:
    told = measured.as_json()
    change(told)
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"mixed": told}))
    with pytest.raises(ConfigError, match=message):
        read_report(path)
    with pytest.raises(ConfigError, match="there is no such file"):
        read_report(tmp_path / "none.json")


@pytest.mark.parametrize("budget", [{}, {"bits": 5.0, "loss": 0.1}, {"bits": 0.0}, {"loss": 0.0}, {"loss": 2.0}])
def test_budgets_that_make_no_sense_are_refused(budget: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Budget(**budget)


def test_a_budget_below_the_smallest_mixture_is_refused(measured: MixedReport) -> None:
    with pytest.raises(ConfigError, match=r"target_bits is 4: the smallest mixture has 4\.\d+ bits"):
        measured.within_bits(4.0)


class Page(HTMLParser):
    """What a browser would run, fetch or find unclosed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str | None] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href") or name.startswith("on")]
        if tag not in ("meta", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "line", "circle", "polyline"):
            assert self.open.pop() == tag


def test_the_page_shows_every_unit_and_fetches_nothing(measured: MixedReport) -> None:
    chosen = measured.within_bits(7.0)
    chosen = replace(chosen, model="<b>&me", measured={"loss": 0.01, "perplexity": 2.0, "plain_perplexity": 1.9})
    text = page(chosen)
    shown = Page(text)
    assert not shown.open and not shown.links
    assert not {"script", "link", "img", "iframe", "b>&me"} & set(shown.tags)
    assert "<b>&me" not in text and "&lt;b&gt;&amp;me" in text
    assert not re.search(r"https?:|@import|url\(", text)
    for unit in chosen.units:
        assert text.count(unit.name) == 2
    assert text.count('class="chosen"') == len(chosen.units)
    assert "+5.26%" in text and "prefers-color-scheme: dark" in text


def test_steps_to_other_precisions_are_the_cheapest() -> None:
    choices = {"plain": Choice(16, 0.0), "int8": Choice(8, 1.0), "a": Choice(5, 4.0), "b": Choice(4, 9.0)}
    unit = Unit("unit", ("layer",), 1, choices, "int8")
    assert unit.smaller() == ("a", 1.0)
    assert unit.larger() == ("plain", 1 / 8)
    assert replace(unit, chosen="b").smaller() is None
    assert replace(unit, chosen="plain").larger() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "a mixture needs one of --target-bits, as 5.0, and --max-loss, as 1%"),
        (["--target-bits", "5", "--max-loss", "1%"], "a mixture needs one of"),
        (["--target-bits", "-1"], "target_bits is -1"),
        (["--max-loss", "much"], "max_loss is 'much': it must be a share of perplexity"),
        (["--max-loss", "0%"], "max_loss is 0: it must be above 0"),
        (["--report", "none.json", "--max-loss", "1%"], "leave target_bits and max_loss out"),
        (["--report", "none.json"], "there is no such file"),
        (["--target-bits", "5", "--group-size", "64"], "group_size and zero_points are for"),
        (["--target-bits", "2"], "the smallest mixture has 4"),
        (["--target-bits", "32"], "the model has 32 bits a weight, ask for fewer"),
        (["--target-bits", "5", "--ignore", "proj"], "every matrix is left plain"),
        (
            ["--max-loss", "1e-12%", "--calibration-rows", "1", "--calibration-tokens", "32"],
            "no layer can be quantized",
        ),
    ],
)
def test_the_command_refuses_in_a_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_model(tmp_path / "model")
    arguments = ["quantize", str(model), "--method", "mixed", "--out", str(tmp_path / "out"), *options]
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1] and lines[-1].startswith("kvern quantize: error: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    measured = any("measuring" in line for line in lines)
    assert measured == ("no layer" in message), "what can be known is said before anything is measured"


def test_an_interrupted_mixture_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    made = mixture(model)
    report = made.measure()
    monkeypatch.setattr(mixed, "measure_folder", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.make(report, Budget(bits=7.0), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_options_of_mixtures_are_refused_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(make_tiny_model(tmp_path)), "--method", "fp8", "--target-bits", "5"]) == 2
    assert "target_bits, max_loss and report are for mixed; method is fp8" in capsys.readouterr().err


def test_the_command_writes_a_mixture_and_takes_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path / "model")
    few = ["--calibration-rows", "2", "--calibration-tokens", "32", "--ignore", r"layers\.0\.mlp"]
    base = ["quantize", str(model), "--method", "mixed", *few]
    assert main([*base, "--target-bits", "7", "--out", str(tmp_path / "first")]) == 0
    captured = capsys.readouterr()
    assert "measuring each precision of each layer over 64 tokens" in captured.err
    assert "bits per weight: " in captured.out and PAGE_NAME in captured.out
    report = tmp_path / "first" / REPORT_NAME
    units = {unit.name for unit in read_report(report).units}
    assert "model.layers.1.mlp.down_proj" in units and "model.layers.0.mlp.down_proj" not in units
    assert main([*base, "--report", str(report), "--out", str(tmp_path / "second")]) == 0
    for name in load_file(tmp_path / "first" / "model.safetensors"):
        first, second = (load_file(tmp_path / part / "model.safetensors")[name] for part in ("first", "second"))
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8)), name
    assert "warning" not in captured.err
    monkeypatch.setattr(mixed, "loss_of", lambda report: 0.7)
    assert main([*base, "--max-loss", "50%", "--out", str(tmp_path / "third")]) == 0
    assert "kvern: warning: the mixture loses 0.7 nats a token, more than the 0.4055 of" in capsys.readouterr().err
    with LLM(str(tmp_path / "second"), max_model_len=128) as llm:
        [output] = llm.generate(["The"], SamplingParams(max_tokens=4, temperature=0))
    assert len(output.outputs[0].token_ids) == 4
