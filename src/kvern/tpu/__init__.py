"""Models as JAX functions, for TPUs: an extra, `kvern[tpu]`, that nothing else of kvern needs.

    folder --loader--> Decoder (PyTorch) --weights.py--> arrays
    ModelSpec --refusals.py, function.py--> step(weights, caches, tokens, rows) -> logits, caches
                                             `-- attention.py: paged attention, a Pallas kernel or plain operations
    generate.py   greedy tokens by such steps, and what PyTorch computes for the same
    ahead.py      steps compiled for a TPU that is not there, and the memory that they take

This is no backend of the engine: nothing here is scheduled, sampled or served.
"""

BLOCK_SIZE = 128
"""Tokens of a block: the lanes of a TPU's registers, over which the keys of a product lie."""
CHUNK = 256
"""The most tokens of a prompt in one step."""
