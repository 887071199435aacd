"""Products with quantized weights on a GPU: which kernel for which number of rows, and PyTorch's own 8-bit products.

`candidates.py` lists what the tuner may choose, `products.py` launches it. Imported only where a GPU is known, so
that a machine without one needs no Triton.
"""
