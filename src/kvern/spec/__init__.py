"""The description of a model as data: its layers, their mixers and their rotary embeddings.

A family in `models/families/` makes a `ModelSpec`; `layers/` are built from it. No module here imports torch.
"""
