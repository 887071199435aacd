"""Guesses at how answers go on: one step verifies several, and gives as many tokens as they are right, and one more.

    result of a step --propose--> DraftProgress.token_ids --schedule--> a decode of 1 + k tokens --verify--> result

Tokens are sampled from the model alone, whatever was guessed, and random numbers depend on seed and position: with any
proposer an answer has the tokens that it has without one.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvern.config import EngineConfig
from kvern.plugins import Plugins
from kvern.request.request import Request
from kvern.spec.model import ModelSpec


class Proposer(Protocol):
    """Asked on the host, between steps."""

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> Sequence[list[int]]:
        """For each request the tokens that may follow its `token_ids`, at most so many; none where there is no guess.

        As many of the first as `in_flight` says are sampled already, and not used. One that raises is not asked again.
        """


OWN = {
    "ngram": "kvern.drafting.ngram:NgramProposer",
    "remote": "kvern.drafting.remote:RemoteProposer",
    "suffix": "kvern.drafting.suffix:SuffixProposer",
}
PROPOSERS: Plugins[Callable[[EngineConfig, ModelSpec], Proposer]] = Plugins("proposer", "kvern.proposers", OWN)
"""The proposers by the name that the option `proposer` gives."""


def takes_drafts(request: Request) -> bool:
    """True if drafts of a request can be verified; not those of beams, of which the host chooses the continuations.

    Embeddings have no second token.
    """
    return not request.spec.embed and request.params.beam_width is None
