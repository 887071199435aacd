"""Requests to the engine and its answers, as plain data.

`request.py` has requests and their sequences, `sampling_params.py` the sampling parameters, `step.py` the messages
between scheduler and runner, `outputs.py` the outputs for users. No module here imports torch.
"""
