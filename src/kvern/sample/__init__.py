"""Sampling: from logits to one token a row.

`constraints.py` applies penalties, biases and bans, `sampler.py` filters and draws, `random.py` makes random numbers
of seed, position and token alone, so that an answer does not depend on its batch. `dry.py` (a penalty for repetitions)
and `rare_filters.py` (top-n-sigma, XTC, dynamic temperature) have no state between steps. `beams.py` finds the most
probable tokens of beams, `processors.py` applies custom logits processors, and `logprobs.py` reports from the model's
own logits. On a GPU `kernels/constraints.py`, `kernels/filters.py` and `kernels/sampling.py` do the same inside CUDA
graphs. Begin with `sampler.py`.

To add a sampling option: a field of `SamplingParams` with its check, and its condition, without which nothing computes
it: of a filter in `has_rare_filters` or `has_common_filters`, of a penalty in `penalizes_tokens`, and a flag of its own
in `runner/needs.py` for what PyTorch alone computes. What beams cannot have has a row in `REFUSED_WITH_BEAMS` (all in
`request/sampling_params.py`). Then its computation in this package. All APIs take it. An option that few requests use
goes into `rare_filters.py`: PyTorch computes it without a kernel, on a CPU for their rows, on a GPU for the whole batch
after the model's CUDA graph.
An option that many use is a number in each row (`device/rows.py`), and has a place in one kernel for GPUs
(`kernels/filters.py` or `kernels/constraints.py`) and in that for CPUs (`cpu/sources/sampling.cpp`, with its fields in
`cpu/sampling.py`). The order of the filters stands in `sampler.py` and in docs/sampling.md. Tests to extend:
`tests/sample/test_rare_filters.py`, or `tests/kernels/test_sampling.py` and `test_cpu_sampling.py`.
"""
