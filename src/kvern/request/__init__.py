"""What is asked of the engine, and what it answers, as plain data.

`request.py` has the request that users make and its sequences, `sampling_params.py` what is asked of the sampler,
`step.py` the messages between the scheduler and the runner, `outputs.py` what users get. No module here imports torch.
"""
