"""Layers of models: linear layers, norms, MLPs, attention and other mixers, experts.

A layer is one class. It owns `LinearMethod`s, which hold, load and multiply its matrices (`linear_method.py`), and does
not know how they are stored: `linear_format.py` chooses a format by the layer's path. What it computes between products
are operations of `Ops`, one set that is chosen when the model is built: PyTorch's, Triton kernels, or kernels for CPUs
(`ops.py`). `block.py` is a
decoder layer; `step_context.py` has what every layer is given with a step's rows. Imports spec, ranks, device and
kernels; knows nothing of checkpoints and requests. Begin with `linear.py`, `ops.py` and `block.py`.
"""
