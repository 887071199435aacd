"""The batch as it lives on a device: rows, the step as tensors, and transfers.

`rows.py` has one row for each running request (tokens, block table, sampling parameters). `input_batch.py` turns a
step into a flat list of tokens, `device_batch.py` does it for the kernels of a GPU, and `transfer.py` copies
differences without waiting. A row's last token is on the device only, so the host plans the next step without it.
Begin with `rows.py`.
"""
