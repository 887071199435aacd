"""Inputs, core and outputs in one object: the engine as one thread drives it."""

import logging
from collections.abc import Sequence

import msgspec

from kvern.adapters.names import AdapterNames
from kvern.config import EngineConfig
from kvern.engine.factory import build_core, facts_of
from kvern.engine.inputs import InputProcessor, Prompt, RequestLimits
from kvern.engine.output import OutputProcessor
from kvern.errors import ConfigError, InvalidRequest
from kvern.models.folder import model_folder
from kvern.request.events import EngineStatistics
from kvern.request.outputs import RequestOutput
from kvern.request.request import NO_OPTIONS, RequestOptions
from kvern.request.sampling_params import SamplingParams
from kvern.runner.startup import Startup
from kvern.sample.processors import load_processors
from kvern.text.tokenizer import Tokenizer

logger = logging.getLogger("kvern")


class Engine:
    """Loads the model of a configuration and runs requests. Not thread-safe. `streams` as in `build_core`."""

    def __init__(self, config: EngineConfig, streams: bool = False) -> None:
        if config.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size is {config.data_parallel_size}, and this is one engine, in this process: leave it "
                "out, or use LLM, kvern run or kvern serve"
            )
        if config.executor != "processes":
            raise ConfigError(
                f"executor is {config.executor}, and this is one engine, in this process: leave it out, or use "
                "LLM, kvern run or kvern serve"
            )
        self.startup = Startup(own_process=False)
        self.config = config
        self.folder = folder = model_folder(config)
        self.core, self.spec, self.layout = build_core(config, folder, self.startup, streams=streams)
        if self.layout.chunk:
            self.core.resize_cache(self.layout.own_chunks)
        with self.startup.stage("tokenizer"):
            self.tokenizer = Tokenizer(folder, config.chat_template_kwargs)
        self.inputs = InputProcessor(
            self.tokenizer,
            facts_of(config, self.spec, self.layout, folder),
            folder,
            RequestLimits(self.layout.max_model_len, self.layout.max_batch_requests),
            config,
            load_processors(config.logits_processors),
        )
        self._outputs = OutputProcessor(self.tokenizer)
        self._members: dict[str, list[str]] = {}
        self._adapters = AdapterNames()
        with self.startup.stage("adapters"):
            for name, path in config.adapters.items():
                self.load_adapter(name, path)
        logger.info("ready after %s", self.startup)

    @property
    def has_work(self) -> bool:
        """Some request has not ended."""
        return self.core.has_work

    @property
    def max_batch_requests(self) -> int:
        """Sequences that run at the same time at most."""
        return self.config.dp_attention_size * self.layout.max_batch_requests

    @property
    def request_ids(self) -> list[str]:
        """Prompts that have not ended."""
        return list(self._members)

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions = NO_OPTIONS,
        *,
        adapter: str | None = None,
    ) -> RequestOutput:
        """Queue a prompt; the returned output grows with each `step`. Raises InvalidRequest or InvalidParameter.

        `adapter` is the name of one that is loaded; None: the model as it is. `options` go into the `RequestSpec`.
        """
        if request_id in self._members:
            raise InvalidRequest(f"request id {request_id!r} is in use: ids must differ")
        key = self._adapters.key(adapter)
        spec = msgspec.structs.replace(self.inputs.request(request_id, prompt, params, options), adapter=key)
        output = self._outputs.add(prompt if isinstance(prompt, str) else None, spec)
        self._members[request_id] = spec.answer_ids
        try:
            self.core.add(spec)
        except BaseException:
            self.abort([request_id])
            raise
        return output

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that requests may use."""
        return [adapter.name for adapter in self._adapters.all()]

    def load_adapter(self, name: str, path: str) -> None:
        """Read the adapter in a folder, for requests to use under this name. Raises InvalidAdapter."""
        adapter = self._adapters.reserve(name, path)
        try:
            self.core.add_adapter(adapter.key, self.core.read_adapter(path))
            self._adapters.add(adapter)
        finally:
            self._adapters.release(adapter)

    def unload_adapter(self, name: str) -> None:
        """Let no new request use an adapter; those that do go on to their end. Raises InvalidRequest."""
        self.core.unload_adapter(self._adapters.remove(name).key)

    def step(self) -> list[RequestOutput]:
        """Run or collect one step; the outputs that changed. One whose step fails ends alone.

        When that is no matter of a request, such as an interruption, every request is aborted.
        """
        try:
            changed, stopped = self._outputs.process(self.core.step())
        except BaseException:
            self.abort(self.request_ids)
            raise
        for request_id, reason, stop in stopped:
            self.core.finish([request_id], reason, stop)
        for output in changed:
            if output.finished:
                self._members.pop(output.request_id, None)
        return changed

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; their outputs keep what they have."""
        for request_id in request_ids:
            members = self._members.pop(request_id, [])
            self.core.finish(members)
            self._outputs.abort(members)

    def close(self) -> None:
        """Abort what runs, and free the memory. Nothing can be run afterwards."""
        self.abort(self.request_ids)
        self.core.close()
        del self.core

    def statistics(self) -> EngineStatistics:
        """Counted since the start."""
        return self.core.statistics()

    def expert_tokens(self) -> list[list[int]]:
        """Returns the number of tokens of each expert of each layer."""
        return self.core.count_experts()()
