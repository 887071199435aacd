"""Model repositories of Triton Inference Server, whose models are answered by `kvern serve`.

`writer.py` writes them. The other files are copied into repositories and run in Triton's Python: they import nothing of
kvern.
"""
