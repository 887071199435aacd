"""Layers of models: linear layers, norms, MLPs, attention and other mixers, experts.

A layer owns `LinearMethod`s, which hold, load and multiply its matrices (`linear_method.py`), and does not know how
they are stored; `linear_format.py` chooses one by the layer's path. `block.py` is a decoder layer, `build.py` what
layers are built with. Plain layers run everywhere; `fused*.py` are made of kernels for GPUs, `compiled*.py` of those
for CPUs. Imports spec, ranks, device and kernels; knows nothing of checkpoints and requests. Begin with `linear.py`
and `block.py`.
"""
