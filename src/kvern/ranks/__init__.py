"""Several processes that compute one model: their process groups, collectives, pipeline stages and expert placement.

`ranks.py` has what ranks do together (sum, gather, choose), `stages.py` the messages of pipeline stages,
`peer_memory.py` and `peer_sums.py` reductions in the memory of other GPUs, and `expert_placement.py` decides without
torch which rank has which expert. Layers call what is here; the processes themselves are in `runner/ranks/`. Begin
with `ranks.py`.
"""
