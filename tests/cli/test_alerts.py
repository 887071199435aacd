"""The alerts of deploy/alerts.yml in Prometheus's own tester: each fires on its fault, no other does, and none on a
healthy or an idle server."""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

RULES = Path(__file__).parents[2] / "deploy/alerts.yml"
PROMTOOL = shutil.which("promtool") or ""
MINUTES = 240
INSTANCE = {"instance": "host:8000"}
MODEL = {**INSTANCE, "model_name": "m"}

pytestmark = pytest.mark.skipif(not PROMTOOL, reason="promtool of Prometheus is not installed")


def steady(each: float, begin: int = 0, then: float | None = None, end: int = MINUTES) -> str:
    """A counter that grows by `each` a minute, and from minute `begin` to `end` by another number."""
    values, now = [], 0.0
    for minute in range(MINUTES):
        values.append(f"{now:g}" if now < 1e6 else f"{now:.0f}")
        now += each if then is None or not begin <= minute < end else then
    return " ".join(values)


def level(value: float, begin: int = MINUTES, then: float = 0.0) -> str:
    """A gauge, another one from minute `begin` on."""
    return " ".join(f"{then if minute >= begin else value:g}" for minute in range(MINUTES))


def latencies(name: str, limit: str, begin: int = 0, late: float = 0.0, end: int = MINUTES) -> dict[str, str]:
    """A histogram of 60 values a minute, within the limit, of which some are above from minute `begin` to `end`."""
    bucket = f"kvern:{name}_seconds_bucket{{le="
    return {
        f'{bucket}"{limit}"}}': steady(60, begin, 60 - late, end),
        f'{bucket}"60.0"}}': steady(60),
        f'{bucket}"+Inf"}}': steady(60),
        f"kvern:{name}_seconds_count{{}}": steady(60),
    }


FIRST, NEXT = ("time_to_first_token", "2.5"), ("inter_token_latency", "0.2")
OK, FAULT, WRONG_KEY = (f'kvern:http_requests_total{{status="{status}"}}' for status in (200, 500, 401))
HEALTHY: dict[str, str] = {
    'up{job="kvern"}': level(1),
    'up{job="another"}': level(0),
    "kvern:engine_ready{}": level(1),
    "kvern:engine_restarts_total{}": steady(0, 100, 1, 101),
    OK: steady(60),
    FAULT: steady(0, 100, 1, 101),
    WRONG_KEY: steady(6),
    'kvern:requests_refused_total{reason="queue"}': steady(0),
    'kvern:requests_refused_total{reason="deadline"}': steady(6),
    "kvern:step_time_ratio{}": level(1.05),
    "kvern:generation_tokens_total{}": steady(3000),
    "kvern:prefill_tokens_total{}": steady(6000),
    "kvern:num_requests_running{}": level(3),
    "kvern:num_requests_waiting{}": level(1),
    "kvern:kv_cache_usage_perc{}": level(0.99),
    "kvern:num_preemptions_total{}": steady(1),
    'kvern:tier_is_on{store="disk"}': level(1),
    **latencies(*FIRST, 100, 1),
    **latencies(*NEXT, 100, 1),
}
IDLE = {
    name: level(float(values.split()[-1])) if "total" in name or "_bucket" in name or "_count" in name else values
    for name, values in HEALTHY.items()
} | {"kvern:num_requests_running{}": level(0), "kvern:num_requests_waiting{}": level(0)}
STILL = {"kvern:generation_tokens_total{}": steady(3000, 200, 0), "kvern:prefill_tokens_total{}": steady(6000, 200, 0)}
"""From minute 200 on no token is computed."""


@dataclass(frozen=True)
class Case:
    """An alert that fires at a minute and no earlier than `before`, if series are these; `beside`: others that do."""

    alert: str
    series: Mapping[str, str]
    summary: str
    labels: Mapping[str, str] = field(default_factory=lambda: MODEL)
    before: int = 201
    at: int = 215
    beside: tuple[str, ...] = ()


def late(kind: str, values: tuple[str, str], begin: int, share: float, summary: str) -> Case:
    """Values that are late from a minute on, for `fast` or `slow` burn of the objective."""
    beside = ("KvernSlow",) if values is FIRST and kind == "fast" else ()
    alert = {"time_to_first_token": "KvernFirstTokensLate", "inter_token_latency": "KvernTokensLate"}[values[0]]
    labels = {**MODEL, "burn": kind}
    return Case(alert, latencies(*values, begin, 60 * share), summary, labels, begin, 214, beside)


TOKENS = "of tokens of host:8000 come within 0.2 s of the one before"
CASES = {
    "down": Case(
        "KvernDown",
        {'up{job="kvern"}': level(1, 200)},
        "host:8000 does not answer Prometheus",
        {**INSTANCE, "job": "kvern"},
    ),
    "no engine": Case(
        "KvernWithoutEngine", {"kvern:engine_ready{}": level(1, 200)}, "host:8000 has no engine for m: the log says why"
    ),
    "deaths": Case(
        "KvernEngineDies",
        {"kvern:engine_restarts_total{}": steady(0, 201, 1, 204)},
        "engines of host:8000 died 3 times in half an hour",
        before=202,
        at=220,
    ),
    "faults": Case(
        "KvernFaults",
        {FAULT: steady(0, 200, 1.2)},
        "1.786% of answers of host:8000 are faults",
        INSTANCE,
    ),
    "full queue": Case(
        "KvernOverloaded",
        {'kvern:requests_refused_total{reason="queue"}': steady(0, 200, 6)},
        "host:8000 refuses requests, because its queue is full",
        INSTANCE,
    ),
    "slow": Case(
        "KvernSlow",
        latencies(*FIRST, 200, 12),
        "one of ten requests to host:8000 waits 31.25s for a token",
        INSTANCE,
        at=218,
    ),
    "keys": Case(
        "KvernWrongKeys",
        {WRONG_KEY: steady(6, 200, 60)},
        "somebody tries keys that host:8000 does not know; the log has the addresses",
        INSTANCE,
        at=225,
    ),
    "slower steps": Case(
        "KvernStepsSlower",
        {"kvern:step_time_ratio{}": level(1, 200, 1.31)},
        "steps of host:8000 take 1.31 times as long as usual: the log says what to look at",
    ),
    "stuck": Case("KvernEngineStuck", STILL, "host:8000 has requests for m, and computes no token of them"),
    "preemptions": Case(
        "KvernKVCacheFull",
        {"kvern:num_preemptions_total{}": steady(1, 200, 60)},
        "host:8000 computes requests again, because the KV cache is full: give it more memory or fewer requests",
        at=225,
    ),
    "store": Case(
        "KvernStoreOff",
        {'kvern:tier_is_on{store="disk"}': level(1, 200)},
        "host:8000 asks its store disk nothing, because it failed: the log says why",
        {**MODEL, "store": "disk"},
    ),
    "first tokens, fast": late("fast", FIRST, 200, 0.8, "only 81.33% of first tokens of host:8000 come within 2.5 s"),
    "first tokens, slow": late("slow", FIRST, 20, 0.08, "only 92.75% of first tokens of host:8000 come within 2.5 s"),
    "next tokens, fast": late("fast", NEXT, 200, 0.8, f"only 81.33% {TOKENS}"),
    "next tokens, slow": late("slow", NEXT, 20, 0.08, f"only 92.75% {TOKENS}"),
    "faults, fast": Case(
        "KvernFaultsBurn",
        {FAULT: steady(0, 200, 5)},
        "1.737% of answers of host:8000 are faults",
        {**MODEL, "burn": "fast"},
        200,
        214,
        ("KvernFaults",),
    ),
    "faults, slow": Case(
        "KvernFaultsBurn",
        {FAULT: steady(0, 20, 0.5)},
        "0.6837% of answers of host:8000 are faults",
        {**MODEL, "burn": "slow"},
        20,
        219,
    ),
}


def alerts() -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return sorted({rule["alert"] for group in groups for rule in group["rules"]})


def group(series: Mapping[str, str], fires: Mapping[int, Mapping[str, Any]], beside: tuple[str, ...] = ()) -> Any:
    """A test of promtool: which alerts, with what, there are at which minutes, and no others."""
    labels = ",".join(f'{name}="{value}"' for name, value in MODEL.items())
    named = [name.replace("{}", f"{{{labels}}}") for name in series]
    named = [name if labels in name else name.replace("}", f",{labels}}}") for name in named]
    named = [name.replace(',model_name="m"', "") if name.startswith("up") else name for name in named]
    return {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": values} for name, values in zip(named, series.values(), strict=True)
        ],
        "alert_rule_test": [
            {
                "eval_time": f"{minute}m",
                "alertname": alert,
                "exp_alerts": [expected[alert]] if alert in expected else [],
            }
            for minute, expected in fires.items()
            for alert in alerts()
            if alert not in beside
        ],
    }


def check(folder: Path, *groups: Any) -> None:
    file = folder / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [*groups]}))
    done = subprocess.run([PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_reads_them() -> None:
    done = subprocess.run([PROMTOOL, "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {case.alert for case in CASES.values()} == set(alerts())


@pytest.mark.parametrize("series", [HEALTHY, IDLE], ids=["healthy", "idle"])
def test_nothing_fires_on_a_server_without_faults(series: dict[str, str], tmp_path: Path) -> None:
    check(tmp_path, group(series, {minute: {} for minute in (5, 60, 104, 115, 239)}))


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_on_its_fault_and_no_other_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    fired = {case.alert: {"exp_labels": dict(case.labels), "exp_annotations": {"summary": case.summary}}}
    check(tmp_path, group({**HEALTHY, **case.series}, {case.before: {}, case.at: fired}, case.beside))
