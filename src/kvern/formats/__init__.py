"""Formats of quantized weights: a file each, which registers a function from `quantization_config` to `LinearMethods`.

Begin with `method.py`, and `fp8.py` as a short format. Checkpoints in GGUF are read in `gguf/`.
"""
