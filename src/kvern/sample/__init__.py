"""Sampling: from logits to one token a row.

`constraints.py` applies penalties, biases and bans, `sampler.py` filters and draws, `random.py` makes random numbers
of seed, position and token alone, so that an answer does not depend on its batch. `dry.py` (a penalty for repetitions)
and `rare_filters.py` (top-n-sigma, XTC, dynamic temperature) have no state between steps. `beams.py` finds the most
probable tokens of beams, `processors.py` applies custom logits processors, and `logprobs.py` reports from the model's
own logits. On a GPU `kernels/constraints.py`, `kernels/filters.py` and `kernels/sampling.py` do the same inside CUDA
graphs. Begin with `sampler.py`.

To add a sampling option: a field of `SamplingParams` with its check and its row in `REFUSED_WITH_BEAMS`
(`request/sampling_params.py`), and its computation in this package. All APIs then take it. An option that few requests
use goes into `rare_filters.py`: PyTorch computes it for their rows, after the model's CUDA graph, without a kernel.
An option that many use is a number in each row (`device/rows.py`) with a place in two kernels: `kernels/filters.py` or
`kernels/constraints.py` for GPUs, and `cpu/sources/sampling.cpp` with its fields in `cpu/sampling.py`. The order of the
filters stands in `sampler.py` and in docs/sampling.md.
"""
