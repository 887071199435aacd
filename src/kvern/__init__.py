"""kvern: an inference and serving engine for large language models.

    from kvern import LLM, SamplingParams

    llm = LLM()
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0].outputs[0].text)

`docs/ARCHITECTURE.md` has the map of the packages and says where to add what; each package's docstring says what is in
it. Names are imported when they are first used, so that `import kvern` does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvern.version import __version__

if TYPE_CHECKING:
    from kvern.async_llm import AsyncLLM
    from kvern.config import EngineConfig
    from kvern.engine.scoring import Score
    from kvern.errors import KvernError
    from kvern.llm import LLM
    from kvern.models.registry import register_family
    from kvern.request.outputs import CompletionOutput, RequestOutput
    from kvern.request.request import PromptInput
    from kvern.request.sampling_params import SamplingParams, StructuredOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "KvernError",
    "PromptInput",
    "RequestOutput",
    "SamplingParams",
    "Score",
    "StructuredOutput",
    "__version__",
    "register_family",
]

_MODULES = {
    "LLM": "kvern.llm",
    "AsyncLLM": "kvern.async_llm",
    "CompletionOutput": "kvern.request.outputs",
    "EngineConfig": "kvern.config",
    "KvernError": "kvern.errors",
    "PromptInput": "kvern.request.request",
    "RequestOutput": "kvern.request.outputs",
    "SamplingParams": "kvern.request.sampling_params",
    "Score": "kvern.engine.scoring",
    "StructuredOutput": "kvern.request.sampling_params",
    "register_family": "kvern.models.registry",
}

_INSTEAD = {
    "AsyncLLMEngine": "it is AsyncLLM(MODEL, ...), and its generate is async for output in llm.stream(prompt, params)",
    "AsyncEngineArgs": "AsyncLLM takes the arguments itself",
    "LLMEngine": "it is LLM, whose stream() gives growing outputs",
    "EngineArgs": "LLM takes the arguments itself",
    "LoRARequest": "give LLM(adapters={NAME: FOLDER}), and adapter=NAME in calls",
    "BeamSearchParams": "beam_search takes a mapping, such as {'beam_width': 4, 'max_tokens': 64}",
    "StructuredOutputsParams": "it is StructuredOutput",
    "GuidedDecodingParams": "it is StructuredOutput",
    "PoolingParams": "embed takes dimensions and truncate_prompt_tokens itself",
    "TokensPrompt": "a prompt is a text, a list of token ids, or {'prompt_token_ids': IDS}",
    "TextPrompt": "a prompt is a text, a list of token ids, or {'prompt': TEXT}",
}
"""vLLM's names that are none of kvern's."""


def __getattr__(name: str) -> Any:
    if name in _INSTEAD:  # an AttributeError's text is lost on the way through `from kvern import ...`
        raise ImportError(f"kvern has no {name}: {_INSTEAD[name]}")
    if name not in _MODULES:
        raise AttributeError(f"module 'kvern' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
