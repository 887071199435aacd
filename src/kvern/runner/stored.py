"""A model before its weights are there."""

from typing import NamedTuple

from kvern.layers.linear_format import LinearMethods
from kvern.ranks.ranks import ALONE, Ranks
from kvern.spec.model import ModelSpec


class Stored(NamedTuple):
    """A model as its steps multiply: what it is made of, how its weights are stored, and who shares it.

    `has_head`: a draft head guesses beside it.
    """

    spec: ModelSpec
    methods: LinearMethods
    ranks: Ranks = ALONE
    has_head: bool = False
