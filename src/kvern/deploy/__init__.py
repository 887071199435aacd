"""From a model's name to a bundle: a folder that was planned, quantized if need be, tuned and verified.

  discover -> plan -> shard -> quantize -> tune -> verify -> bundle        a file each, behind `Stage` (`stage.py`)

`pipeline.py` runs the stages and keeps the result of each in the bundle's folder (`journal.py`), so that a run that was
killed goes on where it was. `tuner.py` chooses options by measurements and knows no engine; `workload.py` measures.
`description.py` is `deploy.toml`, from which `kvern serve` takes a bundle and `kvern deploy` makes it again. Begin with
`stage.py`.
"""
