"""The Helm chart, rendered by Helm itself where the package helm-python-sdk is installed; no cluster takes part."""

import base64
import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvern.cli.main import read_command
from kvern.cli.serve import ServeCommand
from kvern.version import __version__

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "chart"
KEYS = "me:secret\nprometheus:other metrics=1\n"
SECRET = {"apiKeys": {"existingSecret": "kvern-api-keys"}}
FULL = {
    "image": {"repository": "registry.example/kvern", "tag": "2", "pullSecrets": [{"name": "pull"}]},
    "model": "Qwen/Qwen3-0.6B",
    "options": {"threads": None, "max-model-len": 8192, "kv_cache_tokens": 1_000_000, "deterministic": True},
    "huggingFace": {"existingSecret": "hub"},
    "apiKeys": {"content": KEYS},
    "cache": {"size": "1Ti", "storageClass": "fast"},
    "gpus": 2,
    "sharedMemory": "8Gi",
    "resources": {"requests": {"cpu": "8"}, "limits": {"memory": "64Gi"}},
    "runtimeClassName": "nvidia",
    "nodeSelector": {"card": "h200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "podAnnotations": {"team": "language"},
    "startupMinutes": 90,
    "service": {"type": "NodePort", "port": 8080},
    "ingress": {
        "host": "llm.example.org",
        "className": "nginx",
        "tlsSecret": "certificate",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
    },
    "serviceMonitor": {
        "enabled": True,
        "interval": "30s",
        "labels": {"release": "prometheus"},
        "keySecret": {"name": "monitor", "key": "token"},
    },
}
REFUSED = {
    "no keys": ({}, "there are no API keys"),
    "two kinds of keys": ({"apiKeys": {"content": KEYS, "existingSecret": "x"}}, "are both given"),
    "a misspelt value": (SECRET | {"gpu": 1}, "gpu"),
    "half a card": (SECRET | {"gpus": 0.5}, "gpus"),
    "an option that the chart sets": (SECRET | {"options": {"port": 80}}, "port"),
    "no key for metrics": (SECRET | {"serviceMonitor": {"enabled": True}}, "keySecret.name is needed"),
}
PROGRAM = """
import json, sys, helm_python
chart, found = helm_python.Chart.load(sys.argv[1]), {}
for name, values in json.load(sys.stdin).items():
    try:
        chart.validate_schema(values)
        found[name] = chart.render(values=values, name="kvern", namespace="language")
    except helm_python.HelmError as error:
        found[name] = str(error)
json.dump(found, sys.stdout)
"""

with_helm = pytest.mark.skipif(
    importlib.util.find_spec("helm_python") is None, reason="Helm is not on this machine: pip install helm-python-sdk"
)


@pytest.fixture(scope="module")
def rendered() -> dict[str, Any]:
    """Files by name for values that are taken, and what Helm says of those that are refused."""
    cases = {"plain": SECRET, "full": FULL, "claim": SECRET | {"cache": {"existingClaim": "mine"}, "resources": {}}}
    cases |= {name: values for name, (values, _) in REFUSED.items()}
    command = [sys.executable, "-c", PROGRAM, str(CHART)]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def resources(files: dict[str, str]) -> dict[str, Any]:
    """The resources of a release by kind."""
    found = [yaml.safe_load(content) for name, content in files.items() if name.endswith(".yaml")]
    return {resource["kind"]: resource for resource in found if resource}


def without(value: Any, *keys: str) -> Any:
    """The same, without these keys of all mappings."""
    if isinstance(value, dict):
        return {key: without(item, *keys) for key, item in value.items() if key not in keys}
    return [without(item, *keys) for item in value] if isinstance(value, list) else value


@with_helm
def test_the_chart_as_it_stands_is_the_manifests(rendered: dict[str, Any]) -> None:
    made = resources(rendered["plain"])
    assert made["PersistentVolumeClaim"]["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert made["Service"]["spec"].pop("type") == "ClusterIP"
    labels = [f"app.kubernetes.io/{name}" for name in ("instance", "version", "managed-by")]
    written = {item["kind"]: item for item in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
    assert without(made, *labels, "helm.sh/chart", "imagePullPolicy") == written


@with_helm
@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("case", ["plain", "full", "claim"])
def test_follows_the_schemas(rendered: dict[str, Any], case: str, version: str) -> None:
    made = resources(rendered[case])
    monitor = made.pop("ServiceMonitor", None)
    assert (monitor is None) == (case != "full")
    for resource in made.values():
        kubernetes_validate.validate(resource, version, strict=True)


@with_helm
def test_values_are_where_they_belong(rendered: dict[str, Any]) -> None:
    made = resources(rendered["full"])
    pod = made["Deployment"]["spec"]["template"]
    [container] = pod["spec"]["containers"]
    assert container["image"] == "registry.example/kvern:2"
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": "4Gi"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": 2},
    }
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] == 90 * 60
    volumes = {volume.pop("name"): volume for volume in pod["spec"]["volumes"]}
    assert volumes["shared-memory"]["emptyDir"]["sizeLimit"] == "8Gi"
    assert pod["metadata"]["annotations"] == {
        "kvern/api-keys": hashlib.sha256(KEYS.encode()).hexdigest(),
        "team": "language",
    }
    assert base64.b64decode(made["Secret"]["data"]["api-keys"]).decode() == KEYS
    assert volumes["api-keys"]["secret"]["secretName"] == made["Secret"]["metadata"]["name"]
    selector = made["Deployment"]["spec"]["selector"]["matchLabels"]
    for labels in (made["Service"]["spec"]["selector"], made["ServiceMonitor"]["spec"]["selector"]["matchLabels"]):
        assert labels == selector == pod["metadata"]["labels"]
    [endpoint] = made["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "monitor", "key": "token"}
    assert endpoint["port"] == made["Service"]["spec"]["ports"][0]["name"]
    [rule] = made["Ingress"]["spec"]["rules"]
    [path] = rule["http"]["paths"]
    assert path["backend"]["service"]["name"] == made["Service"]["metadata"]["name"] == "kvern"
    assert "Qwen/Qwen3-0.6B will answer at http://kvern.language:8080 " in rendered["full"]["kvern/templates/NOTES.txt"]
    claim = resources(rendered["claim"])
    assert "PersistentVolumeClaim" not in claim
    assert claim["Deployment"]["spec"]["template"]["spec"]["volumes"][0]["persistentVolumeClaim"] == {
        "claimName": "mine"
    }


@with_helm
def test_kvern_takes_the_options(rendered: dict[str, Any]) -> None:
    [container] = resources(rendered["full"])["Deployment"]["spec"]["template"]["spec"]["containers"]
    variables = {item["name"]: item.get("value") for item in container["env"]}
    assert variables.pop("HF_TOKEN") is None
    command, _ = read_command(["serve", *container["args"]], variables)
    assert isinstance(command, ServeCommand)
    engine = command.engine
    assert (engine.model, engine.max_model_len, engine.kv_cache_tokens) == ("Qwen/Qwen3-0.6B", 8192, 1_000_000)
    assert engine.deterministic and engine.threads is None


@with_helm
@pytest.mark.parametrize("case", REFUSED)
def test_values_that_would_be_ignored_are_refused(rendered: dict[str, Any], case: str) -> None:
    assert isinstance(rendered[case], str) and REFUSED[case][1] in rendered[case]


def test_the_chart_is_of_this_version_and_its_values_have_a_schema() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__

    def names(schema: dict[str, Any]) -> Any:
        kept = schema.get("properties", {}) if schema.get("additionalProperties") is False else {}
        return {name: names(inner) for name, inner in kept.items() if name != "global"}

    def same(values: Any, schema: dict[str, Any]) -> None:
        assert not schema or values.keys() == schema.keys()
        for name, inner in schema.items():
            same(values[name], inner)

    same(
        yaml.safe_load((CHART / "values.yaml").read_text()),
        names(json.loads((CHART / "values.schema.json").read_text())),
    )
