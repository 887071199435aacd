"""One device of an engine: weights, KV cache, rows, CUDA graphs, and how a step runs.

`executor.py` receives steps, and `worker.py` owns what lives on the device. `runner.py` runs a step on a CPU,
`device_runner.py` on a GPU. `needs.py` lists what a request asks of sampling; `sampling.py` samples by kernels for
CPUs, `torch_sampling.py` by PyTorch.
`tier.py` moves pages between the KV cache and stores, and `tiered.py` calls it around steps.
The scheduler (`engine/`) is above and is not imported here.
"""
