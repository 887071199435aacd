"""Descriptions of models without a family: found by trying known structures against the model of transformers.

`small.py` makes a small random model of the same type, `facts.py` reads what the tree of modules tells without doubt,
and `search.py` tries what it leaves open until the logits of kvern's decoder agree. Nothing runs a checkpoint's code.
"""
