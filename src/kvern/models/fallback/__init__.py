"""Models that transformers computes over kvern's KV cache, on a CPU.

`description.py` learns the shapes of all attention calls from a pass without weights, `attention.py` registers
kvern's attention with transformers, and `decoder.py` runs the model's body over the tokens of a step. transformers is
imported with these modules and nowhere else.
"""
