"""The broker of KV caches: has engines take and give back the memory on which their models agree (`agreement.py`)."""

from collections.abc import Container, Mapping

from kvern.residency.agreement import CacheShare, agreed, next_sizes
from kvern.serving.client import EngineClient
from kvern.serving.link import EngineLink
from kvern.serving.replica import Replica

GROWTH_BYTES = 4 << 30
"""The bytes that a cache on a GPU gets at once beyond what its requests need: steps wait for some milliseconds."""


def settle(clients: Mapping[str, EngineClient], spare: int, *, needed_alone: bool) -> int:
    """Let caches of models that are awake have `spare` bytes beyond the least of each, as they agree.

    `needed_alone`: no more than their requests need. Returns the bytes that caches were asked to give back just now.
    """
    given_back = 0
    replicas = _replicas(clients)
    shares = {name: _share(replica) for name, replica in replicas.items()}
    agreement = agreed(shares, spare, needed_alone=needed_alone)
    for name, chunks in next_sizes(shares, spare, agreement).items():
        share, ready = shares[name], replicas[name].supervisor.link.ready
        if ready.gpu is not None:  # it says when it has them, and gets the next ones
            most = replicas[name].told_chunks + max(1, GROWTH_BYTES // share.chunk_bytes)
            chunks = min(chunks, max(most, share.needed))
        if replicas[name].resize_cache(chunks):
            given_back += max(0, shares[name].has - chunks) * shares[name].chunk_bytes
    return given_back


def release_pages(clients: Mapping[str, EngineClient], size: int, but: Container[EngineLink] = ()) -> set[EngineLink]:
    """Let tiers of models that are awake give so many bytes of the host back, and take no more until that is 0.

    `but`: engines that are not told. Returns those that were.
    """
    found = [one for client in clients.values() for one in client.replicas if one.supervisor.is_ready]
    told = {one.supervisor.link: one for one in found if one.supervisor.link.ready.pages}
    told = {link: replica for link, replica in told.items() if link not in but}
    for replica in told.values():
        replica.release_pages(-(-size // len(told)))
    return set(told)


def taken(clients: Mapping[str, EngineClient]) -> int:
    """Returns the bytes that caches have beyond the least of each."""
    shares = map(_share, _replicas(clients).values())
    return sum(share.above_least(share.has) for share in shares)


def touched(clients: Mapping[str, EngineClient]) -> int:
    """Returns the bytes of the machine that caches have taken beyond the least of each."""
    replicas = _replicas(clients).values()
    return sum(_share(replica).above_least(min(replica.cache_touched, replica.cache_chunks)) for replica in replicas)


def _replicas(clients: Mapping[str, EngineClient]) -> dict[str, Replica]:
    """Returns the engines whose caches change, by names."""
    return {
        f"{name} {replica.name}": replica
        for name, client in clients.items()
        for replica in client.replicas
        if replica.supervisor.is_ready and replica.supervisor.link.ready.chunk_bytes
    }


def _share(replica: Replica) -> CacheShare:
    ready = replica.supervisor.link.ready
    return CacheShare(
        ready.chunk_bytes, ready.least_chunks, ready.most_chunks, replica.cache_chunks, replica.cache_wanted
    )
