"""``kvern plan``: the best division of a model among cards, with memory and speed of each alternative."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from kvern.cli.output import check_least, make_table, print_lines, print_tables, refuse
from kvern.errors import ConfigError
from kvern.io.files import as_size

if TYPE_CHECKING:
    from kvern.planning.estimate import Estimate, Workload
    from kvern.planning.hardware import Card
    from kvern.planning.splitting import Roles


@dataclass(frozen=True)
class PlanCommand:
    """Find the best way to divide a model among the GPUs of this machine or of another, from the headers of its files:
    memory, cache and speed of each way, and the one with the highest rate under a workload."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Name, folder, GGUF file, or hub id; of the hub the headers alone are read."""
    hardware: str | None = None
    """Cards to plan for, such as "2x h200". None: those of this machine."""
    requests: int = 64
    """Number of concurrent requests."""
    input: int = 1024
    """Tokens of a prompt."""
    output: int = 256
    """Tokens of an answer."""
    write: Path | None = None
    """Write the choice to this TOML file, for --config of kvern serve."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: MODEL has a configuration and no weights."""
    quantization: Literal["fp8", "int8", "int4"] | None = None
    """Format of plain weights after loading, as for kvern serve."""
    dtype: Literal["auto", "bfloat16", "bf16", "float16", "fp16", "half", "float32", "fp32"] = "auto"
    """Number format of weights and activations; auto takes the checkpoint's."""
    workload: str | None = None
    """Load that is simulated, a file or what to draw, to find the fewest engines that keep to --slo."""
    slo: str | None = None
    """Limits of good answers under --workload, such as ttft=500ms,itl=20ms,e2e=5s."""
    good: float = 0.99
    """Share of answers that are to be good."""
    record: Path | None = None
    """Record of steps of `kvern bench steps`, by which --workload is simulated."""
    roofline: bool = False
    """Simulate --workload by estimates; the result is marked as one."""
    most_replicas: int = 64
    """Most engines of --record; with --roofline the cards of --hardware are the limit."""
    compare: tuple[str, ...] = ()
    """Alternatives of --workload: tier=none,host:64GB or split=none,1+3, the ratio of prefill to decode engines."""
    seeds: int = 5
    """Runs of --workload, of which the worst counts."""
    json: bool = False
    """Print the plan as JSON."""

    def execute(self) -> int:
        """Prints the plan and returns the exit code: 1 if the model fits in no way. Raises KvernError."""
        check_least(self, "requests", "input", "output", "most_replicas", "seeds")
        if self.workload is not None:
            from kvern.cli.plan_engines import Asked, plan_engines

            names = (field.name for field in dataclasses.fields(Asked))
            refuse(self, PlanCommand, ("requests", "input", "output", "write"), "--workload has its own requests")
            if self.roofline:
                refuse(self, PlanCommand, ("most_replicas",), "with --roofline the cards of --hardware are the limit")
            return plan_engines(Asked(**{name: getattr(self, name) for name in names}))
        unused = ("slo", "good", "record", "roofline", "most_replicas", "compare", "seeds")
        refuse(self, PlanCommand, unused, "it counts with --workload alone")
        from kvern.cli.models import outlines
        from kvern.config import EngineConfig
        from kvern.models.folder import model_folder
        from kvern.models.repository import outlined_model
        from kvern.planning.choice import model_of, ranked
        from kvern.planning.estimate import Workload
        from kvern.planning.hardware import parse_hardware, this_machine
        from kvern.planning.splitting import roles

        resolved = str(outlined_model(self.model, outlines()))
        config = EngineConfig(resolved, load_format=self.load_format, quantization=self.quantization, dtype=self.dtype)
        config = config if self.hardware is None else dataclasses.replace(config, device="cuda")
        folder = model_folder(config)
        model = model_of(config, folder)
        longest, context = self.input + self.output, model.spec.max_position_embeddings
        if longest > context:
            raise ConfigError(f"input and output are {longest} tokens, above the model's context of {context}")
        cards = this_machine(config, model.dtype) if self.hardware is None else parse_hardware(self.hardware)
        workload = Workload(self.requests, self.input, self.output)
        found = ranked(model, cards, workload)
        if self.write is not None and not found[0].lacks:
            self.write.write_text(as_toml(found[0], self, workload, cards))
        divided = roles(model, cards[0], found, workload)
        if self.json:
            told = {
                "cards": [card.name for card in cards],
                "splits": [dataclasses.asdict(item) for item in found],
                "roles": [dataclasses.asdict(item) for item in divided],
            }
            sys.stdout.write(json.dumps(told, indent=1) + "\n")
        else:
            self._print(found, cards)
            self._print_roles(divided)
            if found[0].lacks and self.quantization is None:
                self._print_smaller(folder)
        return int(bool(found[0].lacks))

    def _print_smaller(self, folder: Path) -> None:
        from kvern.cli.model_report import report_of

        for method, size in report_of(self.model, folder, self.load_format).smaller().items():
            print_lines(f"kvern quantize --method {method} would make about {size / 1e9:.1f} GB of the weights")

    def _print_roles(self, divided: list[Roles]) -> None:
        """Says what prefill and decode engines would do, if there is a choice."""
        from kvern.planning.splitting import SHORT_TOKENS, advice

        if not divided:
            return
        table = make_table(
            "engines",
            "tokens/s",
            f"TTFT ms, {SHORT_TOKENS} tokens",
            f"TTFT ms, {self.input:,}",
            "ms between tokens, p99",
            title=f"engines of {divided[0].split}, by their roles (estimates)",
        )
        for item in divided:
            table.add_row(
                item.name,
                f"{item.rate:,.0f}",
                *(f"{1000 * seconds:.0f}" for seconds in (item.first_short, item.first_long)),
                f"{1000 * item.between:.1f}",
            )
        print_tables(table)
        print_lines(advice(divided))

    def _print(self, found: list[Estimate], cards: list[Card]) -> None:
        from kvern.planning.choice import verdict
        from kvern.planning.hardware import names_of

        table = make_table(
            "split",
            "weights a card",
            "cache tokens",
            "batch",
            "ms/step, 1",
            "ms/step, batch",
            "TTFT ms",
            "tokens/s",
            title=f"{self.model} on {names_of(cards)}, {self.requests} requests of {self.input:,} and "
            f"{self.output:,} tokens",
        )
        for item in found:
            numbers = (
                as_size(int(item.weights)),
                f"{item.split.data * item.cache_tokens:,}",
                f"{item.split.data} x {item.batch}",
                f"{1000 * item.decode_one:.2f}",
                f"{1000 * item.decode:.2f}",
                f"{1000 * item.first_token:.0f}",
                f"{item.rate:,.0f}",
            )
            table.add_row(str(item.split), *(numbers if not item.lacks else (numbers[0], *("-",) * 6)))
        print_tables(table)
        print_lines(verdict(found))
        if self.write is not None and not found[0].lacks:
            print_lines(f"kvern serve {self.model} --config {self.write}")


def as_toml(chosen: Estimate, command: PlanCommand, workload: Workload, cards: list[Card]) -> str:
    """Returns the options of a plan as TOML with comments."""
    from kvern.planning.hardware import names_of

    return (
        f"# {command.model} on {names_of(cards)}\n"
        f"# for {workload.requests} requests at a time, of {workload.input} and {workload.output} tokens\n"
        f"# expected: {1000 * chosen.decode_one:.2f} ms a step with one request, {1000 * chosen.decode:.2f} with "
        f"{chosen.batch}; {chosen.rate:.0f} tokens/s\n"
        f"# of each card: {chosen.weights / 1e9:.1f} GB of weights, {chosen.cache_tokens} tokens of cache\n"
        f"tensor_parallel_size = {chosen.split.tensor}\n"
        f"pipeline_parallel_size = {chosen.split.pipeline}\n"
        f"data_parallel_size = {chosen.split.data}\n"
        + "enable_expert_parallel = true\n" * chosen.split.whole_experts
        + (f'quantization = "{command.quantization}"\n' if command.quantization else "")
        + (f'dtype = "{command.dtype}"\n' if command.dtype != "auto" else "")
    )
