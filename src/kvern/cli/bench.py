"""``kvern bench``: the speed of an engine and of its kernels on this machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from kvern.cli.output import check_least, make_table, print_lines, print_tables, say
from kvern.config import EngineConfig
from kvern.errors import ConfigError, KvernError

if TYPE_CHECKING:
    from kvern.bench.offline import Result
    from kvern.bench.workloads import Workload
    from kvern.engine.engine import Engine


@dataclass(frozen=True)
class Offline:
    """Run workloads of many requests at once, without a server.

    Workloads: mixed256, decode1, decode8, decode32, decode64, decode128, decode256, prefill64x4096, shared2048x256; the
    suites small, brief and full; or a JSONL file of {"prompt_token_ids": [...], "max_tokens": n}.
    """

    workload: tuple[str, ...] = ("decode8",)
    """Workloads, suites or files."""
    repeat: int = 3
    """Measured runs of each workload."""
    warmup: int = 1
    """Runs before the measured ones."""
    temperature: float = 0.6
    """Temperature of all requests."""
    json: Path | None = None
    """Record of all runs, with versions, hardware, options and plan: a file, or a folder for a new one."""
    config: Path | None = None
    """TOML or YAML file with options."""
    engine: EngineConfig = field(default_factory=EngineConfig)

    def execute(self) -> int:
        """Run the workloads, print the table and return the exit code. Raises KvernError."""
        from kvern.bench.offline import Result, record_of, run_once
        from kvern.bench.prediction import predicted_seconds
        from kvern.bench.record import check_target, write_record
        from kvern.request.store_figures import store_rows

        check_least(self, "repeat")
        if self.json is not None:
            check_target(self.json)
        engine, workloads = start_for(self.workload, self.engine)
        results = []
        for workload in workloads:
            runs = []
            for number in range(self.warmup + self.repeat):
                run = run_once(engine, workload, self.temperature)
                say(f"{workload.name}: run {number + 1} of {self.warmup + self.repeat}: {run.seconds:.3f} s")
                runs.append(run)
            results.append(Result(workload, runs[self.warmup :]))
        try:
            predicted: list[float] = predicted_seconds(engine, workloads)
        except KvernError as error:  # a model that is not described has no estimate
            say(f"nothing is predicted: {error}")
            predicted = []
        _print(results, predicted)
        verdicts = ((result.workload.name, result.runs[-1].verdict) for result in results)
        print_lines(*(f"{name}: {verdict}" for name, verdict in verdicts if verdict is not None))
        for name, said in store_rows(engine.statistics().stores):
            say(f"{name}: {said}")
        if self.json is not None:
            cases = [result.case(self.temperature, guess) for result, guess in zip_longest(results, predicted)]
            say(f"record: {write_record(record_of('offline', engine, cases), self.json)}")
        return 0


def _rate(rate: float, most: float, decimals: int) -> tuple[str, str]:
    """A rate in tera and its share of the most that the card reaches; "" where nothing is known of it."""
    return (f"{rate / 1e12:.{decimals}f}", f"{rate / most:.0%}") if rate else ("", "")


@dataclass(frozen=True)
class Kernels:
    """Time the kernels of a model's layers, next to the card's memory bandwidth and compute rate."""

    codes: tuple[str, ...] = ()
    """Also time products with weights in these formats, whatever the model stores: fp8, int4, nf4, q4_k and others,
    or all."""
    json: Path | None = None
    """Record of the times: a file, or a folder for a new one."""
    config: Path | None = None
    """TOML or YAML file with options."""
    engine: EngineConfig = field(default_factory=EngineConfig)

    def execute(self) -> int:
        """Print the table and return the exit code. Raises KvernError."""
        import torch

        from kvern.layers.linear_format import linear_methods
        from kvern.models.folder import model_folder
        from kvern.models.loader import read_config
        from kvern.models.registry import spec_from_config
        from kvern.runner.device import missing_gpu

        if not torch.cuda.is_available():
            raise ConfigError(f"the kernels run on a GPU, but {missing_gpu()}")
        from kvern.bench.kernels import CODES, ceilings, kernel_record, measured_kernels
        from kvern.bench.record import check_target, write_record
        from kvern.layers.tuned_linear import TunedLinear
        from kvern.runner.loaded_model import Stored

        if self.json is not None:
            check_target(self.json)
        unknown = set(self.codes) - {"all", *CODES}
        if unknown:
            raise ConfigError(f"codes are {', '.join(sorted(unknown))}; there are {', '.join(CODES)}, and all")
        device = torch.device("cuda", torch.cuda.current_device())
        described = read_config(model_folder(self.engine))
        spec = spec_from_config(described)
        plain = TunedLinear(device, self.engine.linear_backend)
        model = Stored(spec, linear_methods(described, plain, self.engine.quantization))
        bandwidth, rate = ceilings(device)
        table = make_table(
            "kernel",
            "shape",
            "us",
            "TB/s",
            f"of {bandwidth / 1e12:.2f}",
            "TFLOP/s",
            f"of {rate / 1e12:.0f}",
            title=f"{torch.cuda.get_device_name(device)}, {spec.model_type}",
        )
        codes = CODES if "all" in self.codes else self.codes
        timed = []
        with torch.inference_mode():
            for found in measured_kernels(self.engine, torch.bfloat16, model, codes, device):
                timed.append(found)
                table.add_row(
                    found.kernel,
                    found.shape,
                    f"{1e6 * found.seconds:.1f}",
                    *_rate(found.bytes / found.seconds, bandwidth, 2),
                    *_rate(found.operations / found.seconds, rate, 0),
                )
        print_tables(table)
        if self.json is not None:
            say(f"record: {write_record(kernel_record(self.engine, timed, (bandwidth, rate)), self.json)}")
        return 0


@dataclass(frozen=True)
class ProfileCommand:
    """Show where the time of a workload's steps goes: a table by part of the model, and a Chrome trace.

    Open the trace in ui.perfetto.dev or chrome://tracing. With --base-url the trace is of a running server's next
    steps, whatever they compute, and nothing is started here.
    """

    workload: str = "decode8"
    """Workload, as for `kvern bench offline`."""
    steps: int = 20
    """Steps to profile."""
    warmup: int = 10
    """Steps before them, for the prompts and the capture of CUDA graphs."""
    base_url: str | None = None
    """URL of a running server to profile: http://host:port or https://host, with a prefix if it has one."""
    api_key: str | None = None
    """API key with admin=1 for that server. None: OPENAI_API_KEY, if it is set."""
    seconds: float = 30.0
    """Time that the server waits for its steps, which requests cause."""
    output: Path | None = None
    """File for the trace, FILE.json or FILE.json.gz."""
    json: Path | None = None
    """Record of the parts and kernels: a file, or a folder for a new one."""
    config: Path | None = None
    """TOML or YAML file with options."""
    engine: EngineConfig = field(default_factory=EngineConfig)

    def execute(self) -> int:
        """Print the tables and return the exit code. Raises KvernError."""
        check_least(self, "steps")
        if self.base_url is not None:
            return self._profile_server(self.base_url)
        from kvern.bench.offline import record_of
        from kvern.bench.profile import profile_workload
        from kvern.bench.record import check_target, write_record

        if self.json is not None:
            check_target(self.json)
        engine, (workload, *_) = start_for((self.workload,), self.engine)
        found = profile_workload(engine, workload, self.steps, self.warmup, self.output)
        device = "GPU" if found.on_gpu else "CPU"
        each = 1000 / max(found.steps, 1)
        table = make_table("part", f"{device} ms a step", "share", title=f"{workload.name}: {found.steps} steps")
        for part, seconds in found.parts.items():
            table.add_row(part, f"{each * seconds:.3f}", f"{seconds / found.busy:.1%}" if found.busy else "")
        table.add_row("all of them", f"{each * found.busy:.3f}", "")
        table.add_row("a step, by the clock", f"{each * found.seconds:.3f}", "")
        kernels = make_table("kernel", "calls", "ms", title="the most expensive kernels")
        for name, calls, seconds in found.kernels[:10]:
            kernels.add_row(name[:70], str(calls), f"{1000 * seconds:.2f}")
        print_tables(table, kernels)
        if self.output is not None:
            say(f"trace: {self.output}")
        if self.json is not None:
            say(f"record: {write_record(record_of('profile', engine, [found.case(workload)]), self.json)}")
        return 0

    def _profile_server(self, base_url: str) -> int:
        """Writes the trace of a running server's next steps. Raises ConfigError."""
        import gzip

        from kvern.cli.remote import RemoteServer

        if self.output is None or self.json is not None:
            raise ConfigError("base_url takes the trace of a server: give output, a file for it, and no json")
        if not self.output.parent.is_dir():
            raise ConfigError(f"output is {self.output}: there is no folder {self.output.parent}")
        asked = {"steps": self.steps, "seconds": self.seconds}
        trace = RemoteServer(base_url, self.api_key).read("/v1/profile", asked)
        try:
            self.output.write_bytes(gzip.compress(trace) if self.output.suffix == ".gz" else trace)
        except OSError as error:
            raise ConfigError(f"output cannot be written: {error}") from error
        say(f"trace: {self.output}")
        return 0


def start_for(names: tuple[str, ...], config: EngineConfig) -> tuple[Engine, list[Workload]]:
    """Starts an engine for workloads, prints lines about its start, and returns both. Raises ConfigError."""
    from kvern.bench.offline import check
    from kvern.bench.workloads import resolve
    from kvern.engine.engine import Engine

    resolve(names, 2000)  # a wrong name is refused before the model is loaded
    engine = Engine(config)
    for line in engine.startup.reports:
        say(line)
    say(f"started in {engine.startup}")
    workloads = resolve(names, engine.spec.vocab_size)
    for workload in workloads:
        check(workload, engine)
    return engine, workloads


def _print(results: list[Result], predicted: list[float]) -> None:
    """Prints the results; `predicted` has the seconds of each workload as kvern plan estimates them, or is empty."""
    table = make_table(
        "workload",
        "requests",
        "seconds",
        "min-max",
        "prompt tok/s",
        "generated tok/s",
        "ms/step",
        "TTFT ms p50/p99",
        "ITL ms p50/p99",
        title="kvern bench offline",
    )
    with_drafts = any(result.drafts.count for result in results)
    if with_drafts:
        table.add_column("drafts right")
        table.add_column("tok/step with drafts")
    if predicted:
        table.add_column("s by kvern plan")
    for number, result in enumerate(results):
        low, high = result.spread
        table.add_row(
            result.workload.name,
            str(len(result.workload.prompts)),
            f"{result.seconds:.3f}",
            f"{low:.3f}-{high:.3f}",
            f"{result.prompt_tokens / result.seconds:,.0f}",
            f"{result.generated_tokens / result.seconds:,.0f}",
            f"{result.step_milliseconds:.3f}",
            *(
                f"{result.percentile(name, 50):.1f} / {result.percentile(name, 99):.1f}"
                for name in ("first_token", "between_tokens")
            ),
            *([f"{result.drafts.accepted:,} of {result.drafts.count:,}"] if with_drafts else ()),
            *([f"{result.drafts.tokens_a_step:.2f}"] if with_drafts else ()),
            *([f"{predicted[number]:.3f}"] if predicted else ()),
        )
    print_tables(table)
