"""The contents of the KV cache's blocks: the block pool, the prefix cache, and their extensions.

`manager.py` gives blocks to requests and takes them back, `allocation.py` makes room for them, `block_pool.py` counts
references, `radix.py` is the prefix cache (a radix tree with one edge for each block; the least recently used is
evicted first), and `keys.py` hashes a block's content. `extension.py` is the protocol of windows (`windows.py`),
recurrent states (`states.py`) and tiers (`tier.py`, one extension for tiers of every kind), and `messages.py` is what
these tell the worker with a step. A block is *written* when the step that computes it has ended; only written blocks
are copied to a tier. This package imports no torch and reads no clock, and `tests/cache/test_cache_properties.py`
checks all of it against a simulated memory. Begin with `manager.py`.

`tier.py` speaks of pages of several blocks; stores keep them (`kvern.tiers`), and the worker moves their bytes.
"""
