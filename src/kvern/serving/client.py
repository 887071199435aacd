"""The one client of a model's engines: processes that are replaced when they die, and what is asked of them.

What a request needs to go on is here, not in an engine: its prompt, parameters, seed, and the tokens that arrived.
Another engine gets all of it and computes the next token; a seeded draw depends on seed and position alone.
"""

from collections.abc import Sequence

from kvern.adapters.names import AdapterNames
from kvern.config import EngineConfig
from kvern.engine.output import OutputProcessor
from kvern.errors import EngineClosed
from kvern.models.folder import at_folder, for_engines, model_folder
from kvern.observe.metrics import Metrics, Refusals
from kvern.serving.child import EngineProcess
from kvern.serving.client_inputs import ClientInputs
from kvern.serving.replicas import Replicas
from kvern.text.tokenizer import Tokenizer


class EngineClient:
    """The engine processes of a model, and the parts that talk to them. Belongs to one event loop.

    async with EngineClient(config) as client:
        news = asyncio.Event()
        generation = await client.replicas.submit("Once upon a time", SamplingParams(max_tokens=8), news=news)
        async for _ in client.replicas.follow([generation], news):
            print(generation.output.outputs[0].text)

    `names` are the model's, which no adapter may have, and the first of which stands in the metrics.
    """

    def __init__(
        self, config: EngineConfig, process: EngineProcess | None = None, *, grammars_apart: bool = True
    ) -> None:
        """`process` is the first engine's, if it runs already. `grammars_apart` as in `ClientInputs`.

        Raises ConfigError.
        """
        self.names = config.model_names
        self.folder = model_folder(config)
        self.config = at_folder(config, self.folder)
        self.tokenizer = Tokenizer(self.folder, config.chat_template_kwargs)
        self.inputs = ClientInputs(self.config, self.folder, self.tokenizer, grammars_apart)
        names, outputs = AdapterNames(frozenset(self.names)), OutputProcessor(self.tokenizer)
        self.replicas = Replicas(for_engines(config, self.folder), self.inputs, outputs, names, process)
        self.adapters = self.replicas.adapters
        self.weights = self.replicas.weights
        self.refusals = self.replicas.refusals
        for name, path in self.config.adapters.items():
            self.adapters.names.add(self.adapters.names.reserve(name, path))

    @property
    def metrics(self) -> Sequence[Metrics | Refusals]:
        """All figures."""
        return [*(replica.metrics for replica in self.replicas), self.refusals]

    async def __aenter__(self) -> "EngineClient":
        """Start the processes and wait until the model is loaded. Raises ConfigError with an engine's reason."""
        try:
            await self.start()
        except BaseException:
            await self.replicas.stop()
            raise
        return self

    async def start(self, process: EngineProcess | None = None) -> None:
        """Start the engines, also after `rest`, the first in `process` if it runs already, and wait for them.

        Raises ConfigError with an engine's reason; then they rest.
        """
        await self.replicas.start(process)
        self.inputs.start(self.replicas.ready)

    @property
    def sleeps(self) -> bool:
        """The engines that were started can give their memory back."""
        return all(replica.supervisor.link.ready.sleeps for replica in self.replicas)

    async def sleep(self) -> bool:
        """Have the engines, which can, give their memory back until `start`. Requests wait, and go on then.

        False: one could not, so that they have ended.
        """
        return await self.replicas.sleep()

    async def rest(self) -> None:
        """End the processes until `start`. Requests wait, and go on then."""
        await self.replicas.rest()
        await self.inputs.rest()

    async def __aexit__(self, *error: object) -> None:
        """Abort what runs, and end the processes."""
        try:
            await self.replicas.close(EngineClosed("the engine is closed"))
            await self.inputs.close()
        finally:
            await self.replicas.stop()
