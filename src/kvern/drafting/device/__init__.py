"""Drafters on the device beside the model, and their CUDA graphs.

`drafter.py` is the protocol: a drafter guesses after a step has sampled, without the host having seen the tokens.
`draft_model.py` and `device_draft_model.py` run a smaller model over the same blocks, `head_drafter.py` EAGLE and MTP
heads, and Medusa heads. `draft_graphs.py` and `head_graphs.py` capture them; `captured_head.py` does
so on a CPU.
"""
