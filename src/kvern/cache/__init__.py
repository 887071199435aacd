"""The contents of the KV cache's blocks: the block pool, the prefix cache, and their extensions.

`manager.py` gives blocks to requests and takes them back, `block_pool.py` counts references, `radix.py` is the prefix
cache (a radix tree with one edge for each block; the least recently used is evicted first), and `keys.py` hashes a
block's content. `extension.py` is the protocol of windows (`windows.py`), recurrent states (`states.py`) and tiers
(`tier.py`). A block is *written* when the step that computes it has ended; only written blocks leave the process.

To add a tier (host memory, a disk, a cache server): a class with the methods of `Tier` in `runner/tiered.py`,
registered by `TIERS.register` there or by an entry point of the group `kvern.kv_tiers`; the option `kv_tier` chooses
it, and `tests/support/host_tier.py` is one in full. No torch, no clock: `tests/cache/test_cache_properties.py` checks
all of this package against a simulated memory. Begin with `manager.py`.
"""
