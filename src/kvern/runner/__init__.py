"""One device of an engine: weights, KV cache, rows, CUDA graphs, and how a step runs.

`executor.py` receives steps, `worker.py` owns what lives on the device, `runner.py` and `device_runner.py` run a step.
`tiered.py` has the protocol of KV tiers, `Tier`, and calls it around steps.
The scheduler (`engine/`) is above and is not imported here.
"""
