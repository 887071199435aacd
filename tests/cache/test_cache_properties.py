"""Block pool, prefix tree and cache manager under random use, beside models that are too simple to be wrong."""

from copy import copy

from hypothesis import settings

from kvern.cache.messages import NO_STATE
from kvern.cache.states import StatePool
from kvern.request.request import PromptInput, Request, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from tests.support.cache_machines import LIMIT, CacheMachine
from tests.support.sampling import examples
from tests.support.simulated_device import make_cache

TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=examples(100), stateful_step_count=40)


def test_what_was_forked_and_ends_before_the_next_step_leaves_no_state() -> None:
    cache = make_cache(10, 2, states=4)
    parent = Request(RequestSpec("", PromptInput([0, 1, 0, 1]), ResolvedParams(), LIMIT))
    cache.admit(parent, 1)
    parent.num_computed_tokens = 4
    cache.publish(parent, 1)
    child = copy(parent)
    child.token_ids = [*parent.token_ids, 1]
    assert cache.fork(parent, child) == []
    cache.retract(child)
    cache.free(child, 1)
    cache.check_integrity([parent])
    states = cache.extension(StatePool)
    assert states is not None and all(states.state_at(node) == NO_STATE for node in parent.nodes)
