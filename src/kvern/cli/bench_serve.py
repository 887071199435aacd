"""``kvern bench serve``: load tests of a server that speaks OpenAI's API."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvern.cli.output import check_least, make_table, print_tables, refuse, say
from kvern.config import read_seconds
from kvern.errors import ConfigError

if TYPE_CHECKING:
    from kvern.bench.http_client import HttpClient
    from kvern.bench.serving import LoadRun, Sample, Sender
    from kvern.bench.serving_data import Prompts

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
USUAL_VOCABULARY = 4096
USUAL_LENGTH = 2048
"""Assumed for servers that do not report the length of their context."""
WORKLOAD = Literal["baseline", "continuous_batching", "paged_attention", "chunked_prefill", "prefix_caching"]


@dataclass(frozen=True)
class ServeBench:
    """Send requests to a running server and measure what its clients see. See docs/benchmarking.md."""

    workload: WORKLOAD | None = None
    """One of five predefined loads. --num-prompts, --request-rate and --burstiness change it, the data options do
    not."""
    replay: str | None = None
    """Load to repeat with the same arrivals, lengths and shared prefixes: a JSONL file of `kvern serve --record` or
    Mooncake's form, or properties to draw it from, such as rate=16,input=lognormal:1024:0.8."""
    speed: float = 1.0
    """Times as fast as recorded, for --replay."""
    backend: Literal["openai", "vllm", "openai-chat"] = "openai"
    """The route: completions (openai and vllm are the same), or chat completions."""
    base_url: str | None = None
    """URL of the server: http://host:port or https://host, with a prefix if it has one. None: from --host and
    --port."""
    host: str = "127.0.0.1"
    """Address of the server."""
    port: int = 8000
    """Port of the server."""
    endpoint: str | None = None
    """Path of the route. None: the backend's, /v1/completions or /v1/chat/completions."""
    model: str | None = None
    """Name of the model. None: the first of /v1/models."""
    served_model_name: str | None = None
    """Name of the model in the server, if it differs from `model`."""
    api_key: str | None = None
    """API key, sent as bearer token. None: OPENAI_API_KEY, if it is set."""
    header: tuple[str, ...] = ()
    """Additional headers, each NAME=VALUE."""
    extra_body: str = "{}"
    """JSON object that is merged into every request's body."""

    dataset_name: Literal["random", "sharegpt", "custom", "prefix_repetition"] = "random"
    """Source of the prompts."""
    dataset_path: Path | None = None
    """File for sharegpt (JSON) or custom (JSONL with prompt or messages, and output_tokens)."""
    num_prompts: int | None = None
    """Number of requests. None: 1000, or the workload's own number."""
    num_warmups: int = 0
    """Requests before the measured ones."""
    tokenizer: Path | None = None
    """Folder, hub id or embedded model whose tokenizer gives the vocabulary and counts the tokens of texts."""
    vocab_size: int | None = None
    """Upper bound of random token ids. None: from the tokenizer, else from /v1/models, else 4096."""
    random_input_len: int = 1024
    """Tokens of a random prompt; for chat, about as many words."""
    random_output_len: int = 128
    """Tokens of an answer."""
    random_range_ratio: float = 0.0
    """Share by which lengths vary around the two above, in both directions; 0 makes all the same."""
    random_prefix_len: int = 0
    """Additional tokens that all random prompts begin with."""
    sharegpt_output_len: int | None = None
    """Tokens of an answer. None: as many as the answer in the data has."""
    custom_output_len: int = 256
    """Tokens of an answer for rows that do not say it."""
    prefix_repetition_prefix_len: int = 256
    """Tokens of each shared prefix."""
    prefix_repetition_suffix_len: int = 256
    """Tokens of each request after its prefix."""
    prefix_repetition_num_prefixes: int = 10
    """Number of different prefixes."""
    prefix_repetition_output_len: int = 128
    """Tokens of an answer."""
    seed: int | None = None
    """Seed of prompts and, without --replay, of arrivals. None: a new one each time, so that the server has nothing
    cached from earlier runs."""

    request_rate: float | None = None
    """Requests per second, with random arrivals. None: all at once, or the workload's own rate."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of arrivals: 1 is Poisson, less is burstier, more is more even."""
    max_concurrency: int | None = None
    """Most requests in flight; the time that others wait here is not measured."""
    timeout: float = 3600.0
    """Seconds after which a request counts as failed."""

    ignore_eos: bool = False
    """Ask for answers that do not stop at the model's end token; workloads always do."""
    temperature: float | None = None
    """Sampling temperature. None, here and below: the server's default."""
    top_p: float | None = None
    """Sample from the smallest set of tokens with this probability in all."""
    top_k: int | None = None
    """Sample from the k most probable tokens."""
    min_p: float | None = None
    """Sample from tokens at least this probable, relative to the most probable one."""
    repetition_penalty: float | None = None
    """Divide the logits of tokens that occur in the prompt or the answer."""
    presence_penalty: float | None = None
    """Subtract this from the logits of tokens already generated."""
    frequency_penalty: float | None = None
    """Subtract this from them once for each occurrence."""

    goodput: tuple[str, ...] = ()
    """Limits in milliseconds, such as ttft:200 tpot:50 e2el:2000, for which the requests per second within all of them
    are shown."""
    target_itl: str | None = None
    """Target of the time between tokens, such as 15ms; the share of later tokens is shown."""
    percentile_metrics: str = "ttft,tpot,itl,e2el"
    """Times to show."""
    metric_percentiles: str = "99"
    """Percentiles to show beside mean and median."""
    save_result: bool = False
    """Write a record of all results as JSON, which also has them under vLLM's names."""
    save_detailed: bool = False
    """Write the lengths, times and errors of every request as well."""
    result_dir: Path = Path()
    """Folder for the file."""
    result_filename: Path | None = None
    """File for the results; implies --save-result. None, or a folder: a name with model and time."""
    metadata: tuple[str, ...] = ()
    """Additional entries of the file, each NAME=VALUE."""
    disable_tqdm: bool = False
    """Show no progress on stderr."""

    def execute(self) -> int:
        """Run the load, print the table and return the exit code: 1 if every request failed. Raises KvernError."""
        from kvern.bench.serving import run_loop

        return run_loop(self._measure())

    async def _measure(self) -> int:
        from kvern.bench.serving import Sender, engine_states, fetch
        from kvern.bench.serving_figures import METRICS, metric, read_goodput, summarize
        from kvern.io.progress import generation_progress

        limits = read_goodput(self.goodput)
        metrics = [metric(name.strip()) for name in self.percentile_metrics.split(",")]
        if wrong := set(metrics) - set(METRICS):
            raise ConfigError(f"percentile_metrics has {wrong.pop()!r}: choose from {', '.join(METRICS)}")
        percents = _percents(self.metric_percentiles)
        target = read_seconds("target_itl", self.target_itl or "none")
        self._check()
        seed = random.SystemRandom().randrange(1 << 32) if self.seed is None else self.seed
        async with self._client() as client:
            entry = _model_entry(await fetch(client, "/v1/models"), self.served_model_name or self.model)
            sender = Sender(
                client,
                self.endpoint or ENDPOINTS[self.backend],
                entry["id"],
                self._body(),
                chat=self.backend == "openai-chat",
                timeout=self.timeout,
                progress=None if self.disable_tqdm else generation_progress,
            )
            version = await fetch(client, "/version")
            engines = (await engine_states(client)).get("data", [])
            parts = await self._run(sender, entry, seed)
        found = {
            name: summarize(run, percents, limits, metrics, self.save_detailed, target) for name, run in parts.items()
        }
        _print(f"{self._name}, {entry['id']}, seed {seed}", found, metrics, percents)
        for name, part in found.items():
            for kind, error in part["errors"].items():
                say(f"{name}: {error['count']} requests failed: {kind}: {error['first']}")
        if self.save_result or self.result_filename:
            own = [engine for engine in engines if engine["model"] in (entry["id"], entry.get("parent"))] or engines
            options = own[0].get("options") if own else None
            told = {"server": version, "engine_options": options, "seed": seed}
            self._save(found, {"model": entry["id"], "url": client.url, **told})
        return 0 if any(part["completed"] for part in found.values()) else 1

    @property
    def _name(self) -> str:
        return "replay" if self.replay is not None else self.workload or self.dataset_name

    def _check(self) -> None:
        from kvern.bench.record import check_target

        check_least(self, "num_prompts", "max_concurrency", "vocab_size", "random_input_len", "random_output_len")
        check_least(self, "num_warmups", least=0)
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(f"random_range_ratio is {self.random_range_ratio:g}: it must be at least 0 and below 1")
        if not 0 < self.speed < float("inf") or (self.speed != 1 and self.replay is None):
            raise ConfigError(f"speed is {self.speed:g}: it must be above 0, and needs --replay")
        if self.replay is not None:
            lengths = [field.name for field in dataclasses.fields(self) if _is_of_data(field.name)]
            names = ("workload", "request_rate", "burstiness", "dataset_name", "dataset_path", *lengths)
            refuse(self, ServeBench, names, "--replay has its own requests")
        if self.workload and self.max_concurrency:
            raise ConfigError(
                f"max_concurrency is {self.max_concurrency}: workload {self.workload} has its own; drop one"
            )
        if not self.workload and self.dataset_name in ("sharegpt", "custom") and self.dataset_path is None:
            raise ConfigError(f"dataset {self.dataset_name} needs a file: give --dataset-path")
        if self.save_result or self.result_filename:
            check_target(self.result_dir / (self.result_filename or ""), "result_filename")
        _named(self.metadata, "metadata")

    def _client(self) -> HttpClient:
        from kvern.bench.http_client import HttpClient

        headers = {}
        key = self.api_key or os.environ.get("OPENAI_API_KEY")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        headers |= _named(self.header, "header")
        return HttpClient(self.base_url or f"http://{self.host}:{self.port}", headers)

    def _body(self) -> dict[str, Any]:
        body = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
        if self.ignore_eos or self.workload or self.replay is not None:
            body["ignore_eos"] = True
        try:
            extra = json.loads(self.extra_body)
        except ValueError:
            extra = None
        if not isinstance(extra, dict):
            raise ConfigError(f"extra_body is {self.extra_body!r:.60}: it must be a JSON object")
        return {**body, **extra}

    async def _run(self, sender: Sender, entry: dict[str, Any], seed: int) -> dict[str, LoadRun]:
        from kvern.bench.replay import Replay
        from kvern.bench.serving import arrival_times
        from kvern.bench.serving_data import Prompts
        from kvern.bench.serving_workloads import WORKLOADS, LoadSettings

        prompts = Prompts(None if sender.chat else self._vocabulary(entry), random.Random(seed))
        length = entry.get("max_model_len") or USUAL_LENGTH
        if self.replay is not None:
            replay = Replay(self.replay, self.num_prompts, prompts, seed, entry.get("max_model_len"))
        if self.num_warmups and (self.workload or self.replay is not None):
            await sender.run([prompts.sample(prompts.tokens(8), 8)] * self.num_warmups)
        if self.replay is not None:
            return await replay.run(sender, self.speed, self.max_concurrency)
        if self.workload:
            setting = LoadSettings(sender, prompts, length, self.num_prompts, self.request_rate, self.burstiness)
            return await WORKLOADS[self.workload](setting)
        samples = self._samples(prompts, length)
        warmups, samples = samples[: self.num_warmups], samples[self.num_warmups :]
        rate = float("inf") if self.request_rate is None else self.request_rate
        arrivals = arrival_times(len(samples), rate, self.burstiness, random.Random(f"arrivals {seed}"))
        if warmups:
            await sender.run(warmups)
        return {self.dataset_name: await sender.run(samples, arrivals, self.max_concurrency)}

    def _vocabulary(self, entry: dict[str, Any]) -> int:
        if self.vocab_size or self.tokenizer is None:
            return self.vocab_size or entry.get("vocab_size") or USUAL_VOCABULARY
        from kvern.bench.serving_data import read_tokenizer

        return read_tokenizer(self.tokenizer).vocab_size

    def _samples(self, prompts: Prompts, length: int) -> list[Sample]:
        from kvern.bench import serving_data

        count = (self.num_prompts or 1000) + self.num_warmups
        if self.dataset_name == "random":
            sizes = self.random_input_len, self.random_output_len, self.random_range_ratio, self.random_prefix_len
            return serving_data.random_samples(prompts, count, *sizes)
        if self.dataset_name == "prefix_repetition":
            return serving_data.repeated_prefixes(
                prompts,
                count,
                self.prefix_repetition_prefix_len,
                self.prefix_repetition_suffix_len,
                self.prefix_repetition_num_prefixes,
                self.prefix_repetition_output_len,
            )
        assert self.dataset_path is not None
        tokens = serving_data.token_counter(self.tokenizer)
        if self.dataset_name == "custom":
            return serving_data.custom_samples(self.dataset_path, count, self.custom_output_len, tokens)
        return serving_data.sharegpt_samples(
            self.dataset_path, count, prompts.rng, tokens, self.sharegpt_output_len, length
        )

    def _save(self, found: dict[str, Any], server: dict[str, Any]) -> None:
        """Writes the record of a run, which also has the figures under the names of vLLM's benchmark."""
        from kvern.bench.record import make_record, write_record
        from kvern.bench.serving_figures import case_of

        rate = "inf" if self.request_rate is None else self.request_rate
        secrets = {"api_key", "header"}
        given = dataclasses.asdict(self).items()
        options = {key: "inf" if value == float("inf") else value for key, value in given if key not in secrets}
        own = "workload", "dataset_name", "request_rate", "burstiness"
        data = ("replay", "speed") if self.replay is not None else own
        shape = {name: options[name] for name in (*data, "num_prompts", "max_concurrency", "backend")}
        if self.replay is None:
            shape |= {name: value for name, value in options.items() if _is_of_data(name)}
        metadata = _named(self.metadata, "metadata")
        record = make_record(
            "serve",
            server["model"],
            [case_of(name, [part], shape) for name, part in found.items()],
            options=options,
            conditions=server | metadata,
        )
        assert record.when is not None
        whole = found.values() if self.workload else [found[self._name]]
        beside = {
            "date": record.when[:19].replace("-", "").replace(":", "").replace("T", "-"),
            "endpoint_type": self.backend,
            "backend": self.backend,
            "model_id": record.model,
            "num_prompts": sum(part["completed"] + part["failed"] for part in whole),
            **({} if self.replay is not None else {"request_rate": rate, "burstiness": self.burstiness}),
            "max_concurrency": self.max_concurrency,
            "seed": server["seed"],
            **metadata,
            **({"results": found} if self.workload else found[self._name]),
        }
        path = self.result_dir / (self.result_filename or "")
        say(f"record: {write_record(record, path, beside, 'result_filename')}")


def _is_of_data(option: str) -> bool:
    """Tells whether an option is one of the lengths and numbers of a dataset."""
    return "_len" in option or option.startswith(("random_", "prefix_repetition_"))


def _named(texts: tuple[str, ...], option: str) -> dict[str, str]:
    """Reads texts of the form NAME=VALUE. Raises ConfigError."""
    found = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise ConfigError(f"{option} is {text!r:.60}: it must be NAME=VALUE")
        found[name.strip()] = value.strip()
    return found


def _percents(text: str) -> list[float]:
    try:
        percents = [float(part) for part in text.split(",")]
    except ValueError:
        percents = []
    if not percents or not all(0 < percent <= 100 for percent in percents):
        raise ConfigError(f"metric_percentiles is {text!r:.60}: it must be numbers up to 100, like 50,99")
    return percents


def _model_entry(answer: Any, model: str | None) -> dict[str, Any]:
    """Returns the model's entry in /v1/models, or one with only its name."""
    entries = answer.get("data", []) if isinstance(answer, dict) else []
    for entry in entries:
        if isinstance(entry, dict) and isinstance(entry.get("id"), str) and model in (None, entry["id"]):
            return entry
    if model is None:
        raise ConfigError("the server lists no models at /v1/models: give --model")
    return {"id": model}


def _print(title: str, parts: dict[str, Any], metrics: list[str], percents: list[float]) -> None:
    """Prints one column for each part."""
    from kvern.bench.serving_figures import METRICS

    table = make_table("", *parts, title=f"kvern bench serve: {title}")

    def row(label: str, key: str, form: str = ",.2f", end_section: bool = False) -> None:
        values = [part.get(key) for part in parts.values()]
        if any(value is not None for value in values):
            cells = ["" if value is None else format(value, form) for value in values]
            table.add_row(label, *cells, end_section=end_section)

    row("successful requests", "completed", ",d")
    row("failed requests", "failed", ",d")
    row("duration, s", "duration")
    row("input tokens", "total_input_tokens", ",d")
    row("of them cached", "cached_input_tokens", ",d")
    row("generated tokens", "total_output_tokens", ",d")
    row("requests/s", "request_throughput")
    row("good requests/s", "request_goodput")
    row("tokens later than the target", "late_token_share", ".2%")
    row("generated tokens/s", "output_throughput", ",.1f")
    row("all tokens/s", "total_token_throughput", ",.1f")
    row("CPU of the server, ms a request", "server_cpu_ms")
    row("CPU of the engine, ms a request", "engine_cpu_ms")
    row("latest send, ms after its time", "latest_send_ms", ",.1f")
    row("a core's share for the clients", "client_cpu_share", ".0%", end_section=True)
    for name in metrics:
        label = f"{name.upper()} ms"
        row(f"{label}, mean ({METRICS[name]})", f"mean_{name}_ms")
        row(f"{label}, median", f"median_{name}_ms")
        for percent in percents:
            row(f"{label}, p{percent:g}", f"p{percent:g}_{name}_ms", end_section=percent == percents[-1])
    print_tables(table)
