"""The engines of a server, one for each model, and the names of their models and adapters."""

from dataclasses import replace

from kvern.api.conversation import ChatBody
from kvern.request.sampling_params import SamplingParams
from kvern.server.admission import Admission
from kvern.server.keys import ApiKey
from kvern.serving.client import EngineClient
from kvern.tools.chat import ChatRequest


class ServedEngine:
    """The engine of one model, for the names of the model and of its adapters."""

    def __init__(self, client: EngineClient, admission: Admission) -> None:
        self.client = client
        self.models = client.names
        self.admission = admission

    @property
    def names(self) -> list[str]:
        """The values of `model` for this engine."""
        return [*self.models, *(adapter.name for adapter in self.client.adapters.names.all())]

    def answers_for(self, name: str) -> bool:
        """True if the name is the model's, or that of one of its adapters."""
        return name in self.models or name in self.client.adapters.names

    def adapter_of(self, name: str) -> str | None:
        """Returns the adapter with this name; None for the model itself."""
        return None if name in self.models else name

    async def chat(self, conversation: ChatBody, params: SamplingParams, key: ApiKey, namespace: bytes) -> ChatRequest:
        """Returns a conversation as prompt and parameters, with a reader of its answers.

        Raises InvalidRequest, InvalidParameter or ServerBusy.
        """
        return await self.client.inputs.chat(
            conversation.messages,
            params,
            conversation.use,
            replace(conversation.options, namespace=namespace),
            key.owner,
        )

    def entry(self, name: str, created: int) -> dict[str, object]:
        """Returns a name's entry in OpenAI's list of models, with the sizes of its model."""
        inputs = self.client.inputs
        sizes = {"max_model_len": inputs.max_model_len, "vocab_size": inputs.vocab_size}
        root, parent = (self.models[0], None) if name in self.models else (name, self.models[0])
        origin: dict[str, object] = {"root": root, "parent": parent, "permission": []}
        return {"id": name, "object": "model", "created": created, "owned_by": "kvern", **sizes, **origin}
