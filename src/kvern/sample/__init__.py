"""Sampling: from logits to one token a row.

`constraints.py` applies penalties, biases and bans, `sampler.py` filters and draws, `random.py` makes random numbers
of seed, position and token alone, so that an answer does not depend on its batch. `dry.py` and `rare_filters.py` keep
nothing between steps, `logprobs.py` reports from the model's own logits. On a GPU the same runs in `kernels/`.
"""
