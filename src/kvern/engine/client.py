"""The server's side of an engine: a process that is replaced when it dies, and what is asked of it.

What a request needs to go on is here, not in the engine: its prompt, parameters, seed, and the tokens that arrived. A
new engine gets all of it and computes the next token; a seeded draw depends on seed and position alone.
"""

import dataclasses

from kvern.adapters.names import AdapterNames
from kvern.config import EngineConfig
from kvern.engine.child import EngineProcess
from kvern.engine.client_adapters import ClientAdapters
from kvern.engine.client_inputs import ClientInputs
from kvern.engine.generations import Generations
from kvern.engine.link import EngineLink
from kvern.engine.output import OutputProcessor
from kvern.engine.probation import Probation
from kvern.engine.recovery import Recovery
from kvern.engine.supervisor import Death, Supervisor
from kvern.engine.wire import AdapterRead, Events, Ready
from kvern.errors import EngineClosed, EngineDied
from kvern.models.folder import model_folder
from kvern.observe.metrics import Metrics
from kvern.tokenizer import Tokenizer


class EngineClient:
    """An engine process, and the parts that talk to it. Belongs to one event loop.

    async with EngineClient(config) as client:
        news = asyncio.Event()
        generation = await client.generations.submit("Once upon a time", SamplingParams(max_tokens=8), news=news)
        async for _ in client.generations.follow([generation], news):
            print(generation.output.outputs[0].text)

    `names` are the model's, which no adapter may have, and the first of which stands in the metrics.
    """

    def __init__(self, config: EngineConfig, process: EngineProcess | None = None) -> None:
        """`process`: of the first engine, if it runs already."""
        self.names = config.model_names
        self.folder = model_folder(config)
        self.config = dataclasses.replace(config, model=str(self.folder), revision=None)
        self.tokenizer = Tokenizer(self.folder, config.chat_template_kwargs)
        self.metrics = Metrics(self.names[0])
        self.inputs = ClientInputs(self.config, self.folder, self.tokenizer)
        self.supervisor = Supervisor(self.config, self, process)
        adapters, probation = AdapterNames(frozenset(self.names)), Probation()
        outputs = OutputProcessor(self.tokenizer)
        self.generations = Generations(self.inputs, outputs, adapters, self.supervisor, probation, self.metrics)
        self.adapters = ClientAdapters(adapters, self.supervisor, lambda: self.generations.adapter_keys)
        self._recovery = Recovery(self.generations, probation, self.metrics)
        self._started = False

    @property
    def ready(self) -> Ready:
        """What the engine said of itself when the model was loaded."""
        return self.supervisor.link.ready

    async def __aenter__(self) -> "EngineClient":
        """Start the process and wait until the model is loaded. Raises ConfigError with the engine's reason."""
        for name, path in self.config.adapters.items():
            self.adapters.names.add(self.adapters.names.reserve(name, path))
        await self.supervisor.start()
        self._started = True
        self.inputs.start(self.ready)
        if self.ready.gpu is not None:
            self.metrics.watch_gpu(self.ready.gpu)
        return self

    async def __aexit__(self, *error: object) -> None:
        """Abort what runs, and end the process."""
        closed = EngineClosed("the engine is closed")
        self.generations.close(closed)
        self.adapters.interrupt(closed)
        try:
            await self.inputs.close()
        finally:
            await self.supervisor.stop()

    def hear(self, message: AdapterRead | Events) -> None:
        """What the engine says."""
        if isinstance(message, AdapterRead):
            self.adapters.hear(message)
        else:
            self.metrics.step(message.statistics, message.seconds)
            self.generations.deliver(message.events)
        self._recovery.heard()

    def died(self, death: Death) -> bool:
        """The engine has ended; returns whether that taught which request may be the cause."""
        self.adapters.interrupt(death.reason)
        self.metrics.engine(ready=False)
        return self._recovery.died(death)

    async def prepare(self, link: EngineLink) -> None:
        """Have a new engine read all adapters that are in use. Raises InvalidAdapter if it is the first engine."""
        self.adapters.interrupt(EngineDied("the engine was replaced"))
        lost = await self.adapters.read_all(link)
        if lost and not self._started:
            raise next(iter(lost.values()))
        self.adapters.lose(lost)
        self.generations.lose(lost)

    def resume(self) -> None:
        """Give a new engine what it may work on now."""
        self.metrics.engine(ready=True)
        if self._started:
            self.metrics.restarted()
        self.generations.resume()
        self.adapters.resume()
