"""The paged KV cache on the device, and attention over it.

`base.py` has the two interfaces: `AttentionBackend` (a cache and its attention) and `AttentionKernels` (plan once a
step, run for each layer). `paged.py` is the backend for GPUs, `compiled.py` for CPUs, `torch_sdpa.py` for all else.
`selection.py` checks and times the libraries of GPUs; `groups.py` has the block tables of layers with a window. No
library was best for decodes and for prompts, so each phase of a step has its own kernels over the same cache. Imports
layers, kernels and device; knows nothing of requests. Begin with `base.py`, then `paged.py`.
"""
