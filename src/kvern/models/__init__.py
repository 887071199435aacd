"""Models: from a folder or a name to a loaded decoder or encoder.

`families/` makes a `ModelSpec` of a `config.json`, `decoder.py` and `encoder.py` run what layers were built from it,
and `loader.py` streams each tensor of a checkpoint to its place. `share.py` and `stages.py` divide a model among
ranks, `fallback/` has transformers compute a model, and `hub.py` and `folder.py` find its files. Begin with
`decoder.py`.
"""
