"""Sampling: from logits to one token a row.

`constraints.py` applies penalties, biases and bans, `sampler.py` filters and draws, `random.py` makes random numbers
of seed, position and token alone, so that an answer does not depend on its batch. `dry.py` and `rare_filters.py` keep
nothing between steps, and `logprobs.py` reports from the model's own logits. On a GPU `kernels/constraints.py`,
`kernels/filters.py` and `kernels/sampling.py` do the same inside CUDA graphs.

To add a sampling option: a field of `SamplingParams` with its check (`request/sampling_params.py`), and what it does
here. Options that few requests use go into `rare_filters.py` and run after a graph; an option inside the graph also
has a number in its row (`device/rows.py`) and a place in a kernel. Begin with `sampler.py`.
"""
