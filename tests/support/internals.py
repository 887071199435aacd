"""Parts of an engine that only tests read: the one module of tests that knows where they are."""

from typing import Any

from kvern.drafting.device.drafter import GuardedDrafter


def engine_of(llm: Any) -> Any:
    """The engine of an `LLM` or `AsyncLLM`."""
    return llm._engine


def core_of(llm: Any) -> Any:
    """The `EngineCore` of an `LLM` or `AsyncLLM` whose engine is in this process."""
    return llm._engine.core


def worker_of(llm: Any) -> Any:
    """The `Worker` of an engine with one rank, in this process."""
    return llm._engine.core.executor._worker


def runner_of(llm: Any) -> Any:
    """The runner of that worker."""
    return worker_of(llm).runner


def pace_of(engine: Any) -> Any:
    """The `Pace` of an engine in this process."""
    return engine.core._pace


def set_pace(core: Any, pace: Any) -> None:
    """Replaces the pace of a core."""
    core._pace = pace


def drafter_of(llm: Any) -> Any:
    """The drafter of that runner, without its guard."""
    return runner_of(llm)._drafter._drafter


def decoder_of(llm: Any) -> Any:
    """The model of that runner."""
    return runner_of(llm)._decoder


def vocab_size_of(llm: Any) -> int:
    """The number of tokens that the engine's model knows."""
    return int(llm._engine.inputs.vocab_size)


def check_integrity(llm: Any) -> None:
    """Checks that blocks, states and requests of the scheduler agree with each other."""
    core_of(llm).scheduler.check_integrity()


def rows_of(llm: Any) -> Any:
    """The batch rows of that runner."""
    return runner_of(llm)._rows


def set_drafter(llm: Any, drafter: Any) -> None:
    """Replaces the drafter of that runner; None: there is none."""
    runner_of(llm)._drafter = GuardedDrafter(drafter)


def proposer_of(llm: Any) -> Any:
    """The proposer of drafts on the host."""
    return core_of(llm).drafting._proposer


def set_depth(llm: Any, depth: int) -> None:
    """Sets the number of steps that are submitted before the first result is read."""
    core_of(llm)._depth = depth


def adapters_in_memory(engine: Any) -> int:
    """The number of adapters in host memory."""
    return len(engine.core.executor._worker._store._adapters)
