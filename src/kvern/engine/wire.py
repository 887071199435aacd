"""What the server's process and the engine's process say to each other: msgpack, never pickle.

server --> Start, then AddRequests, FinishRequests, LoadAdapter, UnloadAdapter, Shutdown       --> engine
server <-- Loading until Ready, then Events, at least twice a second, and AdapterRead; Failed ends the engine <-- engine
"""

from typing import Any

import msgspec

from kvern.events import EngineStatistics, TokenEvent
from kvern.request import FinishReason, Request
from kvern.sampling_params import SamplingParams


class Message(msgspec.Struct, tag=True, array_like=True, gc=False):
    """One message; arrays on the wire, the tag first."""


class NewRequest(msgspec.Struct, array_like=True, gc=False):
    """A request as the scheduler needs it; `leader` is the id of the group's request that computes the prompt.

    `generated` and `reported_prompt_logprobs` are what an earlier engine did for it.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    stop_token_ids: list[int]
    bad_word_ids: list[tuple[int, ...]]
    priority: int
    namespace: bytes
    turn: int
    group: str | None
    leader: str | None
    generated: list[int] = []
    reported_prompt_logprobs: int = 0
    grammar: str | None = None
    embed: bool = False
    adapter: int | None = None

    @classmethod
    def of(cls, request: Request, reported_prompt_logprobs: int = 0) -> "NewRequest":
        """What is sent for a request that has not run, or of which nothing but the prompt's is reported."""
        return cls(
            request.request_id,
            request.token_ids[: request.prompt_length],
            request.params,
            request.max_tokens,
            request.seed,
            sorted(request.stop_token_ids),
            list(request.bad_word_ids),
            request.priority,
            request.namespace,
            request.turn,
            request.group,
            None if request.leader is None else request.leader.request_id,
            reported_prompt_logprobs=reported_prompt_logprobs,
            grammar=request.grammar,
            embed=request.embed,
            adapter=request.adapter,
        )

    def resumed(self, generated: list[int], reported_prompt_logprobs: int) -> "NewRequest":
        """The same, to go on behind these tokens, alone: the others of its group may have ended."""
        return msgspec.structs.replace(
            self,
            group=None,
            leader=None,
            generated=generated,
            reported_prompt_logprobs=reported_prompt_logprobs,
        )

    def request(self, leader: Request | None) -> Request:
        """The request again, on the other side; `leader` is the first one of its message."""
        request = Request(
            request_id=self.request_id,
            token_ids=self.token_ids,
            params=self.params,
            max_tokens=self.max_tokens,
            seed=self.seed,
            stop_token_ids=frozenset(self.stop_token_ids),
            bad_word_ids=tuple(self.bad_word_ids),
            priority=self.priority,
            namespace=self.namespace,
            turn=self.turn,
            grammar=self.grammar,
            embed=self.embed,
            adapter=self.adapter,
            group=self.group,
            leader=None if self.leader is None else leader,
        )
        request.token_ids += self.generated
        request.reported_prompt_logprobs = self.reported_prompt_logprobs
        return request


class Start(Message):
    """The options, as built-in values; `model` is a folder."""

    config: dict[str, Any]


class AddRequests(Message):
    """The requests of one prompt, the leader first."""

    requests: list[NewRequest]


class FinishRequests(Message):
    """End requests: their client has gone, or a stop string was seen."""

    request_ids: list[str]
    reason: FinishReason = "abort"
    stop_reason: str | None = None


class LoadAdapter(Message):
    """Read the adapter in a folder; requests name it by its key, once AdapterRead has come."""

    key: int
    path: str


class UnloadAdapter(Message):
    """Forget an adapter when the requests that use it have ended."""

    key: int


class Shutdown(Message):
    """End the process."""


class Loading(Message):
    """A sign of life while the model is loaded."""


class Ready(Message):
    """The model is loaded; `report` says how long each stage took, `gpu` which one it runs on, by its UUID."""

    max_model_len: int
    max_batch_requests: int
    report: str
    gpu: str | None = None


class Failed(Message):
    """The engine cannot start, or a step failed; the process ends."""

    reason: str


class AdapterRead(Message):
    """An adapter can be used, or why not."""

    key: int
    error: str | None = None


class Events(Message):
    """What one step did, and how the engine stands after it; without events a sign of life."""

    events: list[TokenEvent]
    statistics: EngineStatistics
    seconds: float


encode = msgspec.msgpack.Encoder().encode
decode_for_engine = msgspec.msgpack.Decoder(
    Start | AddRequests | FinishRequests | LoadAdapter | UnloadAdapter | Shutdown
).decode
decode_for_server = msgspec.msgpack.Decoder(Loading | Ready | Failed | AdapterRead | Events).decode
