"""Drafters on the device beside the model, and their CUDA graphs.

`drafter.py` is the protocol: a drafter proposes tokens after a step has sampled, before the host has seen its tokens.
`draft_model.py` and `device_draft_model.py` run a smaller model over the same blocks, `head_drafter.py` EAGLE and MTP
heads, and Medusa heads. `draft_graphs.py` and `head_graphs.py` capture the drafters as CUDA graphs; `captured_head.py`
captures a head on a CPU.
"""
