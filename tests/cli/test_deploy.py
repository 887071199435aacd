"""The files under deploy/, against schemas, linters, the server's own options, and each other."""

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvern.cli.main import read_command
from kvern.cli.serve import ServeCommand
from kvern.config import EngineConfig
from kvern.cpu.kernel_library import READY_MADE, find_compiler, library_path
from kvern.cpu.processor import all_isas, usable_isas
from kvern.observe.exposition import GPU_FIGURES
from kvern.observe.metrics import KeyFigures, Metrics, ModelFigures, Refusals
from kvern.server.config import ServerConfig
from kvern.server.run import CLOSING_SECONDS
from kvern.traces.sending import TraceFigures
from tests.support.cache_folder import load_kernels
from tests.support.served import KEY, Served

SOURCE = Path(__file__).parents[2]
DEPLOY = SOURCE / "deploy"
SUFFIXES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


def text(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def manifests(content: str) -> dict[str, Any]:
    """The Kubernetes resources by kind."""
    return {resource["kind"]: resource for resource in yaml.safe_load_all(content)}


def compose() -> Any:
    return yaml.safe_load(text("compose.yaml"))


def pod() -> Any:
    return manifests(text("kubernetes.yaml"))["Deployment"]["spec"]["template"]["spec"]


def dockerfile_list(instruction: str) -> list[str]:
    """The last list that a Dockerfile's instruction has: an exec form."""
    found = re.findall(rf"^{instruction}\b.*?(\[.*\])$", text("Dockerfile").replace("\\\n", ""), re.MULTILINE)
    return json.loads(found[-1])


def unit(key: str) -> str:
    """The value that the systemd unit gives to a key."""
    return dict(line.split("=", 1) for line in text("kvern.service").splitlines() if "=" in line)[key]


STARTED = """
import logging, shutil, sys
from kvern import LLM, SamplingParams
from kvern.cpu import library
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
with LLM("kvern-1m", cache_dir=sys.argv[1], threads=1, max_model_len=64) as llm:
    print(len(llm.generate(["Once upon a time"], SamplingParams(max_tokens=4, ignore_eos=True))))
print("loaded", library._loaded is not None, "compilers", *filter(shutil.which, ("c++", "g++", "clang++")))
"""


@pytest.mark.nightly
def test_containers_without_a_compiler_start_with_the_kernels_of_the_image(tmp_path: Path) -> None:
    """The command of the image, with a compiler that copies the library of the tests; then two starts."""
    load_kernels("cpu_sampling", 1)
    real = library_path(EngineConfig().cache_folder, find_compiler())
    shutil.copytree(SOURCE / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "ready_made"))
    compiler = tmp_path / "compiler"
    script = f'for last; do :; done\ncase "$*" in\n*--version*) echo 1 ;;\n*-shared*) cp {real} "$last" ;;\nesac\n'
    compiler.write_text("#!/bin/sh\n" + script)
    compiler.chmod(0o755)
    [command] = re.findall(r"^RUN (.*python -m kvern.cpu.build)$", text("Dockerfile"), re.MULTILINE)
    bare = tmp_path / "bare" / "python"
    bare.parent.mkdir()
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # as in the image, no package is installed yet
    bare.chmod(0o755)
    environment = {"PATH": f"{bare.parent}:/bin:/usr/bin", "CXX": str(compiler), "OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    names = [line.partition(": ")[0] for line in said.stdout.splitlines()]
    assert names == [isa.name for isa in all_isas()]
    for file in (tmp_path / "src/kvern/cpu/ready_made").iterdir():
        file.chmod(0o444)
    (tmp_path / "bin").mkdir()
    environment |= {
        "PATH": str(tmp_path / "bin"),
        "CXX": "",
        "PYTHONPATH": str(tmp_path / "src"),
        "HOME": str(tmp_path),
    }
    for name in {usable_isas()[-1].name, usable_isas()[0].name}:
        started = subprocess.run(
            [sys.executable, "-c", STARTED, str(tmp_path / "cache")],
            env=environment | {"KVERN_CPU_ISA": name}, capture_output=True, text=True,
        )  # fmt: skip
        assert f"kernels for this CPU use {name}, which came with the package" in started.stdout, started.stderr
        assert started.stdout.endswith("1\nloaded True compilers\n"), started.stdout


def test_the_wheel_takes_the_kernels_along() -> None:
    """Git ignores them, and with it what makes wheels."""
    configuration = tomllib.loads((SOURCE / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = configuration["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["artifacts"] == [f"{READY_MADE.relative_to(READY_MADE.parents[3])}/*.so"]


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(DEPLOY.rglob("*.y*ml")) if path.parent.name != "templates"],
    ids=lambda path: path.name,
)
def test_yaml_parses(path: Path) -> None:
    assert all(isinstance(document, dict) for document in yaml.safe_load_all(path.read_text(encoding="utf-8")))


class TestCompose:
    @pytest.mark.parametrize("comment", ["", "# "], ids=["gpu", "cpu"])
    def test_follows_the_specification(self, comment: str, tmp_path: Path) -> None:
        content = text("compose.yaml").replace("# gpus: all", f"{comment}gpus: all")
        assert ("gpus" in yaml.safe_load(content)["services"]["kvern"]) == (not comment)
        assert self.errors(content, tmp_path) == ""

    def test_the_check_sees_a_misspelt_key(self, tmp_path: Path) -> None:
        assert "restrt" in self.errors(text("compose.yaml").replace("restart:", "restrt:"), tmp_path)

    def errors(self, content: str, folder: Path) -> str:
        file = folder / "compose.yaml"
        file.write_text(content, encoding="utf-8")
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout + done.stderr if done.returncode else ""

    def test_mounts_what_is_there(self) -> None:
        """Every file is in the checkout, and where its reader looks for it."""
        configuration = compose()
        mounts = {}
        for service in configuration["services"].values():
            for volume in service.get("volumes", ()):
                source, target = volume.split(":")[:2]
                if source.startswith("."):
                    assert (DEPLOY / source).exists(), source
                    mounts[target] = source
                else:
                    assert source in configuration["volumes"]
            assert set(service.get("secrets", ())) <= set(configuration["secrets"])
        provider = yaml.safe_load(text("grafana/provisioning/dashboards/kvern.yml"))["providers"][0]
        assert mounts[provider["options"]["path"] + "/kvern.json"] == "./grafana/kvern.json"
        ignored = (DEPLOY.parent / ".gitignore").read_text(encoding="utf-8").split()
        assert {str(Path("deploy", secret["file"]).parent) + "/" for secret in configuration["secrets"].values()} <= {
            *ignored
        }

    def test_prometheus_reaches_kvern_and_grafana_prometheus(self) -> None:
        services = compose()["services"]
        [job] = yaml.safe_load(text("prometheus.yml"))["scrape_configs"]
        service, port = job["static_configs"][0]["targets"][0].split(":")
        assert services[service]["ports"] == [f"127.0.0.1:{port}:{port}"]
        assert job["authorization"]["credentials_file"] in {
            f"/run/secrets/{secret}" for secret in services["prometheus"]["secrets"]
        }
        [source] = yaml.safe_load(text("grafana/provisioning/datasources/prometheus.yml"))["datasources"]
        service, port = source["url"].removeprefix("http://").split(":")
        assert services[service]["ports"] == [f"127.0.0.1:{port}:{port}"]


class TestKubernetes:
    @pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
    def test_follows_the_schemas(self, version: str) -> None:
        """As it stands, and with the lines for a GPU and a model of one's own."""
        whole = re.sub(r"# (nvidia|- \{name: KVERN)", r"\1", text("kubernetes.yaml"))
        assert whole.count("#") == text("kubernetes.yaml").count("#") - 3
        for resource in [*manifests(text("kubernetes.yaml")).values(), *manifests(whole).values()]:
            kubernetes_validate.validate(resource, version, strict=True)

    def test_the_check_sees_a_misspelt_key(self) -> None:
        resource = manifests(text("kubernetes.yaml").replace("readinessProbe", "readynessProbe"))["Deployment"]
        with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
            kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)

    def test_names_fit_together(self) -> None:
        resources = manifests(text("kubernetes.yaml"))
        volumes = {volume["name"]: volume for volume in pod()["volumes"]}
        [container] = pod()["containers"]
        claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
        assert claim == resources["PersistentVolumeClaim"]["metadata"]["name"]
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        labels = resources["Deployment"]["spec"]["template"]["metadata"]["labels"]
        assert resources["Service"]["spec"]["selector"] == labels
        assert resources["Deployment"]["spec"]["selector"]["matchLabels"] == labels
        assert f"--uid {pod()['securityContext']['runAsUser']} " in text("Dockerfile")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine")
class TestUnit:
    def analyze(self, content: str, folder: Path, *arguments: str) -> tuple[int, str]:
        file = folder / "kvern.service"
        file.write_text(content.replace("/opt/kvern/bin/kvern", sys.executable), encoding="utf-8")
        done = subprocess.run(["systemd-analyze", *arguments, str(file)], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def test_verifies(self, tmp_path: Path) -> None:
        verify = ("verify", "--man=no", "--recursive-errors=no")
        assert self.analyze(text("kvern.service"), tmp_path, *verify) == (0, "")
        assert "'Restrt'" in self.analyze(text("kvern.service").replace("Restart=", "Restrt="), tmp_path, *verify)[1]

    def test_is_hardened(self, tmp_path: Path) -> None:
        """An exposure of at most 1.6 of 10."""
        code, report = self.analyze(text("kvern.service"), tmp_path, "security", "--offline=true", "--threshold=16")
        assert code == 0, report


def command_lines() -> dict[str, list[str]]:
    """The arguments with which each file starts kvern."""
    image = dockerfile_list("ENTRYPOINT")[1:]
    return {
        "image": image,
        "compose": image + compose()["services"]["kvern"]["command"],
        "kubernetes": image + pod()["containers"][0]["args"],
        "systemd": unit("ExecStart").split()[1:],
    }


@pytest.mark.parametrize("name", command_lines())
def test_kvern_takes_the_arguments(name: str) -> None:
    command, _ = read_command(command_lines()[name], {})
    assert isinstance(command, ServeCommand)
    assert command.server.host == ("127.0.0.1" if name == "systemd" else "0.0.0.0")
    assert command.server.port == 8000


def test_environment_variables_are_options() -> None:
    files = ("compose.yaml", "kubernetes.yaml", "kvern.service")
    named = {name.lower() for file in files for name in re.findall(r"\bKVERN_([A-Z_]+)", text(file))}
    assert named >= {"model", "threads", "max_model_len"}
    assert named <= {field.name for kind in (EngineConfig, ServerConfig) for field in dataclasses.fields(kind)}


def test_the_service_takes_over_changed_keys() -> None:
    install, kill = re.findall(r"^ExecReload=(.*)$", text("kvern.service"), re.MULTILINE)
    assert install == unit("ExecStartPre")
    assert install.split()[-1] == unit("ExecStart").split()[-1]
    assert kill == "kill -HUP $MAINPID"
    assert unit("RuntimeDirectoryMode") == "0700", "nobody else may read the copy"


def test_nobody_kills_before_running_requests_end() -> None:
    container = pod()["containers"][0]
    before = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    least = ServerConfig().grace_seconds + CLOSING_SECONDS
    assert int(unit("TimeoutStopSec")) > least
    assert int(compose()["services"]["kvern"]["stop_grace_period"].removesuffix("s")) > least
    assert pod()["terminationGracePeriodSeconds"] > before + least
    assert unit("KillMode") == "mixed"  # the engine has to outlive the signal as well


@pytest.fixture
def server() -> Iterator[Served]:
    served = Served("--api-key", KEY, "--threads", "1", "--max-model-len", "256")
    yield served
    if served.process.poll() is None:
        served.stop()


def test_probes(server: Served, tmp_path: Path) -> None:
    """The commands that Docker and Kubernetes run, against a real server."""
    [container] = pod()["containers"]
    ready, health = container["readinessProbe"]["exec"]["command"], dockerfile_list("HEALTHCHECK")
    assert ready[-2:] == ["8000", container["args"][-1]]
    assert health[-1] == "8000"

    def run(command: list[str], *arguments: object) -> tuple[int, str]:
        """Run a probe with other arguments at its end."""
        assert command[0] == "python"
        command = [sys.executable, *command[1 : -len(arguments)], *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stderr

    keys, named, wrong = (tmp_path / name for name in ("keys", "named", "wrong"))
    keys.write_text(f"{KEY}\n", encoding="utf-8")
    named.write_text(f"monitor:{KEY} metrics=1\nsomeone:else\n", encoding="utf-8")
    wrong.write_text(f"not-{KEY}\n{KEY}\n", encoding="utf-8")
    assert run(ready, server.port, keys) == (0, "")
    assert run(ready, server.port, named) == (0, "")
    assert run(ready, server.port, wrong) == (1, "/ready: 401 Unauthorized\n")
    assert run(health, server.port) == (0, "")
    server.stop()
    assert run(ready, server.port, keys)[0] == 1
    assert run(health, server.port)[0] == 1


OF_SERVERS = "kvern:trace_spans_total"
"""What counts for a server, whatever models it has."""


def metric_samples() -> dict[str, set[str]]:
    """The names of every metric's samples, by the metric's name."""
    figures = Metrics("model"), Refusals("model"), KeyFigures("model"), ModelFigures("model"), TraceFigures()
    metrics = [(metric.type, metric.name) for one in figures for metric in one.registry.collect()]
    metrics += [("gauge", f"kvern:{name}") for name in GPU_FIGURES]
    return {name: {name + suffix for suffix in SUFFIXES[kind]} for kind, name in metrics}


@pytest.fixture(scope="module")
def dashboard() -> Any:
    return json.loads(text("grafana/kvern.json"))


def alert_rules() -> list[Any]:
    return [rule for group in yaml.safe_load(text("alerts.yml"))["groups"] for rule in group["rules"]]


def test_alerts_parse() -> None:
    config = yaml.safe_load(text("prometheus.yml"))
    mounts = yaml.safe_load(text("compose.yaml"))["services"]["prometheus"]["volumes"]
    assert [f"./alerts.yml:{file}:ro" for file in config["rule_files"] if f"./alerts.yml:{file}:ro" in mounts]
    for rule in alert_rules():
        promql_parser.parse(rule["expr"])
        assert rule["annotations"]["summary"] and re.fullmatch(r"\d+m", rule.get("for", "1m"))
    burns = {(rule["alert"], rule["labels"]["burn"]) for rule in alert_rules() if "labels" in rule}
    objectives = ("KvernFirstTokensLate", "KvernTokensLate", "KvernFaultsBurn")
    assert burns == set(itertools.product(objectives, ("fast", "slow")))
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    assert {rule["expr"].partition('job="')[2].partition('"')[0] for rule in alert_rules()} - {""} <= jobs


@pytest.mark.nightly
def test_alerts_know_the_metrics_of_a_server() -> None:
    """A metric with labels that were not needed yet has no sample: its family says what it will have."""
    server = Served("--api-key", KEY, "--threads", "1", "--max-model-len", "256", "--kv-tier", "host:64MB")
    body = {"prompt": "Once", "max_tokens": 4}
    assert server.raw("POST", "/v1/completions", json.dumps(body).encode())[0] == 200
    request = urllib.request.Request(
        server.url.removesuffix("/v1") + "/metrics", headers={"authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    server.stop()
    known = {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}
    buckets = {(sample.name, sample.labels.get("le")) for family in families for sample in family.samples}
    for rule in alert_rules():
        assert set(re.findall(r"kvern:\w+", rule["expr"])) <= known, rule["alert"]
        assert set(re.findall(r'(kvern:\w+)\{le="([\d.]+)"\}', rule["expr"])) <= buckets


class TestDashboard:
    def test_expressions_parse_and_know_their_metrics(self, dashboard: Any) -> None:
        samples, shown = metric_samples(), set()
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                expression = target["expr"]
                promql_parser.parse(expression.replace("$__rate_interval", "1m").replace("$__range", "1h"))
                names = re.findall(r'(kvern:\w+)\{model_name=~"\$model_name"\}', expression)
                names += re.findall(OF_SERVERS, expression)
                assert names and len(names) == expression.count("kvern:"), f"not all of one model: {expression}"
                shown |= set(names)
        assert shown <= set().union(*samples.values())
        assert [name for name, parts in samples.items() if not parts & shown] == []

    def test_variables(self, dashboard: Any) -> None:
        source, model = dashboard["templating"]["list"]
        assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
        assert (model["name"], model["query"]["query"]) == (
            "model_name",
            "label_values(kvern:num_requests_running, model_name)",
        )
        users = [model, *(panel for panel in dashboard["panels"] if panel["type"] != "row")]
        assert {user["datasource"]["uid"] for user in users} == {"${datasource}"}

    def test_panels_do_not_overlap(self, dashboard: Any) -> None:
        ids, covered = [panel["id"] for panel in dashboard["panels"]], []
        assert len(set(ids)) == len(ids)
        for panel in dashboard["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
            covered += itertools.product(columns, rows)
        assert len(set(covered)) == len(covered)
