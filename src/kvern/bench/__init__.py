"""Benchmarks: workloads, `kvern bench offline`, and the client of `kvern bench serve`.

`workloads.py` says what is measured, `offline.py` runs it on an engine in this process, and `serving.py` sends requests
to any server that speaks OpenAI's API; `replay.py` makes them of a load (`kvern.loads`). `kernels.py` times the kernels
of the kernel list. `record.py` is the form in which all of them keep what they found.
"""
