"""kvern as an application of Ray Serve: `serve run kvern.ray_serve:application model=Qwen/Qwen3-8B device=cuda`.

  client -> Serve's proxy -> SessionRouter -> ModelReplica on some node: kvern's HTTP application -> its engines

Each replica is a whole server with one or several engine processes. Serve starts and ends replicas by the number of
their requests, and replaces those that are lost with their nodes.
"""

import contextlib
import dataclasses
import math
import random
import tempfile
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica
from starlette.types import ASGIApp

from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.observe.exposition import servers_text
from kvern.options.values import converted
from kvern.server.app import Server
from kvern.server.config import ServerConfig
from kvern.server.keys import KeyRing
from kvern.serving.client import EngineClient

NAME = "kvern"
"""The name of the deployment in Serve's configuration files and metrics."""
USUAL_BATCH = {"cpu": 256, "cuda": 512}
"""The default of max_batch_requests."""
BUSY_SHARE = 0.75
"""The mean load of replicas, as a share of their running requests, above which another is started."""
OF_SERVE = ("host", "port", "uds", "root_path", "tls_cert", "tls_key", "request_timeout", "grace_seconds")
"""Options of a server that Serve determines here."""


@dataclasses.dataclass(frozen=True)
class ReplicaOptions:
    """Options of Serve about replicas, under these names among the application's options."""

    min_replicas: int = 1
    """Least number of replicas."""
    max_replicas: int = 1
    """Most replicas."""


def application(options: dict[str, Any]) -> serve.Application:
    """Returns an application for Ray Serve with these options: those of kvern serve, and `ReplicaOptions`, by their
    names.

    Values are texts, as from `serve run`, or values of YAML. Options about replicas are defaults, which the deployment
    `kvern` of a configuration file can change. Raises ConfigError, and Serve's errors about numbers of replicas.
    """
    engine, server, replicas = read_options(options)
    batch = engine.data_parallel_size * (engine.max_batch_requests or USUAL_BATCH[engine.device])
    engines = 0 if engine.executor == "ray" else engine.data_parallel_size
    gpus = engines * engine.ranks if engine.device == "cuda" else 0
    deployment = serve.deployment(
        name=NAME,
        max_ongoing_requests=batch + server.max_queue,
        ray_actor_options={"num_gpus": gpus, "num_cpus": max(1, engines * (engine.threads or 1))},
        autoscaling_config={
            "min_replicas": replicas.min_replicas,
            "max_replicas": replicas.max_replicas,
            "target_ongoing_requests": max(1, math.floor(BUSY_SHARE * batch)),
        },
        request_router_config={"request_router_class": f"{__name__}.SessionRouter"},
    )
    wrapped = deployment(serve.ingress()(ModelReplica))
    return wrapped.bind(dataclasses.asdict(engine), dataclasses.asdict(server))


def read_options(options: Mapping[str, Any]) -> tuple[EngineConfig, ServerConfig, ReplicaOptions]:
    """Returns the options of each class. Raises ConfigError."""
    kinds = EngineConfig, ServerConfig, ReplicaOptions
    types = {name: kind for owner in kinds for name, kind in typing.get_type_hints(owner).items()}
    values = {}
    for key, value in options.items():
        name = key.replace("-", "_")
        if name in OF_SERVE:
            raise ConfigError(f"{name} is {value!r}: Ray Serve listens here; leave it out, or see its http_options")
        if name.startswith("models"):
            raise ConfigError(f"{name} is {value!r}: a deployment of Ray Serve has one model; make one of each")
        if name == "record":
            raise ConfigError(f"record is {value!r}: replicas of Ray Serve record nothing; record one server")
        if name == "adapter_folder":
            raise ConfigError(f"{name} is {value!r}: one replica alone would hear of it; name adapters by adapters")
        values[name] = converted(name, value, types, f"option {key}", strict=not isinstance(value, str))
    engine, server, replicas = (
        {name: values[name] for name in typing.get_type_hints(kind) if name in values} for kind in kinds
    )
    config = EngineConfig(**engine)
    if config.device == "auto":
        raise ConfigError("device is auto: Ray has to know what a replica takes of a node; give cuda or cpu")
    return config, ServerConfig(**server), ReplicaOptions(**replicas)


class SessionRouter(ConsistentHashRouter):
    """A router that sends requests with the same header x-session-id to one replica, which has their prefixes cached,
    while it has room; others go to the less busy of two random replicas."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns lists of replicas to try in order; of each list, the one with the fewest requests is taken."""
        if pending_request is None or pending_request.metadata.session_id:
            return await super().choose_replicas(candidate_replicas, pending_request)
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]


class ModelReplica:
    """A server in a process of Serve, with the processes of its engines on the same node."""

    def __init__(self, engine: dict[str, Any], server: dict[str, Any]) -> None:
        config = ServerConfig(**server)
        self._folder = tempfile.TemporaryDirectory(prefix="kvern-", dir=config.data_dir, ignore_cleanup_errors=True)
        config = dataclasses.replace(config, data_dir=Path(self._folder.name))
        self._client = EngineClient(EngineConfig(**engine))
        self._running = contextlib.AsyncExitStack()
        self._config, self._keys = config, KeyRing(config)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Loads the model. Raises ConfigError."""
        await self._running.enter_async_context(self._client)
        self._server = Server([self._client], self._config, self._keys, self._figures_of_all)
        self._running.push_async_callback(self._server.stop)
        return self._server.app()

    def check_health(self) -> None:
        """Raises EngineUnavailable if engines do not stay alive here; Serve then replaces this process."""
        self._client.replicas.check_alive()

    def figures(self) -> tuple[str, bytes]:
        """Returns this replica's name and its metrics in Prometheus's text format."""
        return serve.get_replica_context().replica_id.unique_id, self._server.figures()

    async def _figures_of_all(self) -> bytes:
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        return servers_text(await handle.broadcast("figures").results_async())

    async def __del__(self) -> None:
        await self._running.aclose()
        self._folder.cleanup()
