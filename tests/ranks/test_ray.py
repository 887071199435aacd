"""kvern on a Ray cluster of two nodes, which are groups of processes of this machine."""

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import msgspec
import openai
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvern import LLM, SamplingParams
from kvern.errors import ConfigError
from kvern.io.sockets import MOST_PROCESSES
from kvern.runner.ranks.rank_processes import MODULE, MODULE_OF_DP_ATTENTION
from tests.support.families import make_checkpoint
from tests.support.ports import free_port
from tests.support.ray_cluster import RAY, RayCluster
from tests.support.served import ENGINE, KEY, Served, command_of, eventually
from tests.support.tiny_model import make_tiny_model

pytest.importorskip("ray.serve")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
CPUS = 3
"""Of each node: less than two ranks with two threads need."""
PROMPTS = ["Once upon a time", "The little dog", "A cat and a bird", "One day the sun"]
TOKENS = 60
LONG = 450
NEWLINE = b"\n"
MODEL = {"model": "kvern-1m", "device": "cpu", "dtype": "float32", "max_model_len": 512}
FLAGS = [part for name, value in MODEL.items() for part in (f"--{name.replace('_', '-')}", str(value))]
START_SECONDS = 240
"""On a machine that is busy with other tests."""
SERVE = str(Path(RAY).with_name("serve"))
ASKED: dict[str, Any] = {"model": "kvern-1m", "seed": 7, "temperature": 0.8, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster(CPUS) as found:
        yield found


@pytest.fixture(scope="module")
def expected() -> dict[int, list[str]]:
    """What one process answers to the prompts, by the number of tokens."""
    params = SamplingParams(temperature=0.8, seed=7, ignore_eos=True)
    with LLM(**MODEL, threads=1) as llm:
        return {
            tokens: [output.outputs[0].text for output in llm.generate(PROMPTS, params.replace(max_tokens=tokens))]
            for tokens in (TOKENS, LONG)
        }


@contextlib.contextmanager
def application(cluster: RayCluster, folder: Path, **options: Any) -> Iterator[str]:
    """kvern as an application of Ray Serve, until the end of the block: its address."""
    port = free_port()
    arguments = {**MODEL, "served_model_name": "kvern-1m", **options}
    described = {"name": "chat", "import_path": "kvern.ray_serve:application", "args": arguments}
    file, log = folder / "serve.yaml", folder / "serve.log"
    file.write_text(yaml.safe_dump({"http_options": {"port": port}, "applications": [described]}))
    with log.open("wb") as out:
        serving = subprocess.Popen([SERVE, "run", str(file)], env=cluster.environment, stdout=out, stderr=out)
    try:
        address = f"http://127.0.0.1:{port}"
        eventually(lambda: serving.poll() is not None or is_ready(address), START_SECONDS)
        assert serving.poll() is None, log.read_text()
        yield address
    finally:
        serving.send_signal(signal.SIGINT)
        serving.wait(240)


def is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)


Stream = tuple[str, Any]
"""One that has said something: that, and the rest."""


def begun(asked: openai.OpenAI, prompt: str, tokens: int = TOKENS, **headers: str) -> Stream:
    stream = asked.completions.create(prompt=prompt, max_tokens=tokens, stream=True, extra_headers=headers, **ASKED)
    return next(stream).choices[0].text, stream


def ended(stream: Stream) -> str:
    return stream[0] + "".join(chunk.choices[0].text for chunk in stream[1])


def figures(asked: openai.OpenAI, name: str) -> dict[str, float]:
    """One of the metrics, by replica."""
    text = asked.with_options().get("/../metrics", cast_to=str)
    return {
        sample.labels["replica"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"kvern:{name}"
    }


@contextlib.contextmanager
def serving_on(cluster: RayCluster, *arguments: str, model: Sequence[str] = FLAGS) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        served = Served("--executor", "ray", *model, *arguments)
    try:
        yield served
    finally:
        assert served.stop() == 0
    eventually(lambda: not engines_of(cluster))


def engines_of(cluster: RayCluster, *nodes: subprocess.Popen[bytes]) -> list[int]:
    """The processes of engines and their ranks on these nodes, or on all."""
    found = []
    for pid in cluster.processes(*nodes):
        command = command_of(pid)
        found += [pid] if any(module in command for module in (ENGINE, MODULE, MODULE_OF_DP_ATTENTION)) else []
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("flag", ["-tp", "-pp"])
@pytest.mark.timeout(600)
def test_ranks_of_two_nodes_answer_as_one_process(
    cluster: RayCluster, expected: dict[int, list[str]], flag: str
) -> None:
    with serving_on(cluster, flag, "2", "--threads", str(CPUS - 1)) as served:
        assert [len(engines_of(cluster, node)) for node in cluster.nodes] == [1, 1]
        for pid in engines_of(cluster):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert f"{MOST_PROCESSES}=1".encode() in variables, "a node has processors for one alone"
        asked = served.client()
        assert [ended(begun(asked, prompt)) for prompt in PROMPTS] == expected[TOKENS]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_ranks_of_two_nodes_have_requests_of_their_own(cluster: RayCluster, tmp_path: Path) -> None:
    folder = str(make_checkpoint("qwen3_moe", make_tiny_model(tmp_path), vocab_size=288))
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 128}
    params = SamplingParams(temperature=0.8, seed=7, ignore_eos=True, max_tokens=TOKENS)
    with LLM(folder, threads=1, **options) as llm:  # type: ignore[arg-type]
        expected = [output.outputs[0].text for output in llm.generate(PROMPTS, params)]
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    dividing = "-tp", "2", "--enable-expert-parallel", "--enable-dp-attention"
    with serving_on(cluster, *dividing, "--threads", str(CPUS - 1), model=(folder, *flags)) as served:
        assert [len(engines_of(cluster, node)) for node in cluster.nodes] == [1, 1]
        asked = served.client()
        with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as threads:
            given = {**ASKED, "model": folder, "max_tokens": TOKENS}
            answers = threads.map(lambda prompt: asked.completions.create(prompt=prompt, **given), PROMPTS)
            assert [answer.choices[0].text for answer in answers] == expected


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_engines_are_added_on_nodes_that_have_room(
    cluster: RayCluster, expected: dict[int, list[str]], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"admin:{KEY} admin=1\n")
    with serving_on(cluster, "--threads", str(CPUS), "--api-key-file", str(keys)) as served:
        assert served.raw("POST", "/v1/add_engine", b"{}")[0] == 200
        assert [len(engines_of(cluster, node)) for node in cluster.nodes] == [1, 1]
        status, _, refused = served.raw("POST", "/v1/add_engine", b"{}")
        assert status == 400
        assert f"the engines need {3 * CPUS} CPUs, and the Ray cluster has {2 * CPUS}" in refused["error"]["message"]
        assert served.raw("POST", "/v1/remove_engine", b'{"engine": "0"}')[0] == 200
        assert len(engines_of(cluster)) == 1
        asked = served.client()
        assert [ended(begun(asked, prompt)) for prompt in PROMPTS] == expected[TOKENS]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_replicas_answer_and_sessions_stay(cluster: RayCluster, expected: dict[int, list[str]], tmp_path: Path) -> None:
    with application(cluster, tmp_path, min_replicas=2, max_replicas=2) as address, client(address) as asked:
        eventually(lambda: len(figures(asked, "engine_ready")) == 2, START_SECONDS)
        session = {"x-session-id": "one"}
        assert [ended(begun(asked, prompt, **session)) for prompt in PROMPTS] == expected[TOKENS]
        generated = figures(asked, "generation_tokens_total")
        assert sorted(generated.values()) == [0, len(PROMPTS) * TOKENS], "one replica had all of the session"


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_job_goes_on_without_a_node_and_another_time(expected: dict[int, list[str]], tmp_path: Path) -> None:
    with RayCluster(CPUS) as cluster:
        job_loses_a_node(cluster, expected[TOKENS], tmp_path)


def job_loses_a_node(cluster: RayCluster, expected: list[str], folder: Path) -> None:
    rows = [{"prompt": prompt, "seed": 7, "temperature": 0.8, "ignore_eos": True} for prompt in PROMPTS * 40]
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    command = [sys.executable, "-m", "kvern", "run", str(source), str(output), "--max-tokens", str(TOKENS)]
    command += ["--executor", "ray", "-dp", "2", "--threads", "1", "--max-batch-requests", "4", *FLAGS]

    def started() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=cluster.environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE)

    def written() -> int:
        assert job.poll() is None, job.communicate()[1].decode()
        return output.read_bytes().count(b"\n") if output.exists() else 0

    job = started()
    eventually(lambda: written() > 0, START_SECONDS)
    before = written()
    assert [len(engines_of(cluster, node)) for node in cluster.nodes] == [1, 1]
    cluster.remove_node(cluster.nodes[1])
    eventually(lambda: written() > before + 16)
    job.kill()
    job.communicate()
    record = msgspec.json.decode(output.with_name(f".{output.name}.progress").read_bytes())
    kept = output.read_bytes()[: record["done"]["answer_bytes"]]
    eventually(lambda: not engines_of(cluster))
    job = started()
    said = job.communicate(timeout=START_SECONDS)
    assert job.returncode == 0, said
    assert f"(+ {kept.count(NEWLINE)} before)" in said[0].decode(), "what was done was not done again"
    assert output.read_bytes().startswith(kept)
    assert [msgspec.json.decode(line)["answer"] for line in output.read_bytes().splitlines()] == expected * 40


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_streams_go_on_when_a_node_leaves(expected: dict[int, list[str]]) -> None:
    with (
        RayCluster(CPUS) as cluster,
        serving_on(cluster, "-dp", "2", "--threads", "2") as served,
        concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool,
    ):
        asked = served.client()
        leaving = cluster.nodes[1]
        (engine,) = engines_of(cluster, leaving)
        streams = [begun(asked, prompt, LONG) for prompt in PROMPTS]
        os.kill(engine, signal.SIGSTOP)
        assert sum(served.figure("num_requests_running", engine=name) > 0 for name in "01") == 2, "none has ended"
        cluster.remove_node(leaving)
        assert list(pool.map(ended, streams)) == expected[LONG]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_streams_of_a_lost_replica_are_cut_off_and_others_go_on(expected: dict[int, list[str]], tmp_path: Path) -> None:
    with (
        RayCluster(1) as cluster,
        application(cluster, tmp_path, min_replicas=2, max_replicas=2) as address,
        client(address) as asked,
        concurrent.futures.ThreadPoolExecutor(12) as pool,
    ):
        eventually(lambda: len(figures(asked, "engine_ready")) == 2, START_SECONDS)
        leaving = cluster.nodes[1]
        (engine,) = engines_of(cluster, leaving)
        os.kill(engine, signal.SIGSTOP)

        def is_whole(session: int) -> bool:
            try:
                stream = begun(asked, PROMPTS[0], **{"x-session-id": str(session)})
                return ended(stream) == expected[TOKENS][0]
            except (openai.APIError, httpx.HTTPError):
                return False

        streams = [pool.submit(is_whole, session) for session in range(12)]
        eventually(lambda: any(stream.done() for stream in streams))
        cluster.remove_node(leaving)
        whole = [stream.result() for stream in streams]
        assert True in whole and False in whole
        assert ended(begun(asked, PROMPTS[1])) == expected[TOKENS][1], "others answer"


def test_an_application_refuses_what_is_not_for_it() -> None:
    from kvern.ray_serve import application

    for options, message in [
        ({"model": "kvern-1m"}, "device is auto: Ray has to know"),
        ({"device": "cpu", "port": 80}, "port is 80: Ray Serve listens here"),
        ({"device": "cpu", "adapter_folder": "/adapters"}, "one replica alone would hear of it"),
        ({"device": "cpu", "modle": "kvern-1m"}, "option modle is no option: did you mean model"),
    ]:
        with pytest.raises(ConfigError, match=message):
            application(options)


def test_replicas_are_added_before_a_batch_is_full() -> None:
    from kvern.ray_serve import application

    options = {"device": "cuda", "max_batch_requests": "40", "tensor_parallel_size": 2, "max_replicas": 4}
    made = application(options)._bound_deployment  # what Serve reads, too
    assert made._deployment_config.autoscaling_config.target_ongoing_requests == 30
    assert made.max_ongoing_requests == 40 + 2048
    assert made.ray_actor_options["num_gpus"] == 2


def test_the_manifest_holds_what_ray_serve_and_kubernetes_read() -> None:
    """Custom resources have no schema here: their parts have."""
    from ray.serve.schema import ServeDeploySchema

    from kvern.ray_serve import application

    manifest = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "ray.yaml").read_text())
    (described,) = ServeDeploySchema.model_validate(yaml.safe_load(manifest["spec"]["serveConfigV2"])).applications
    assert described.import_path == "kvern.ray_serve:application"
    options = {**described.args, "api_key_file": "keys"}
    assert [one.name for one in described.deployments] == [application(options)._bound_deployment.name]
    cluster = manifest["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        template = group["template"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "node", **template["metadata"]}}
        kubernetes_validate.validate(
            {**pod, "spec": template["spec"]}, kubernetes_validate.latest_version(), strict=True
        )
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    worker = cluster["workerGroupSpecs"][0]
    assert worker["maxReplicas"] == described.args["max_replicas"], "a GPU for each replica"
    volumes = {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in worker["template"]["spec"]["containers"][0]["volumeMounts"]} == volumes
