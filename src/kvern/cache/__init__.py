"""Which blocks of the KV cache hold what: the block pool, the prefix cache, and what models with windows or states add.

`manager.py` gives blocks to requests and takes them back. `block_pool.py` counts references, `radix.py` is the prefix
cache (a radix tree with one edge for each block, the least recently used first to be evicted), `keys.py` hashes a
block's content, `windows.py` has block tables of layers with a window, `states.py` the slots of recurrent states,
`tier.py` blocks that are kept elsewhere. A block is *written* when the step that computes it has ended; only written
blocks leave. No torch, no clock: `tests/cache/test_cache_properties.py` checks all of it against a simulated memory.
"""
