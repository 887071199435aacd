"""The executors and processes of several ranks, the messages between them, and experts that move.

`rank_executors.py` is the first rank: it sends each step to the others and answers. `rank_processes.py` starts and
watches these, `rank_process.py` is such a process (a `Worker` that receives steps), and `rank_wire.py` has the
messages. `rank_sums.py` chooses how rows are added up, and `experts.py` counts the tokens of experts and gives them
other places while the engine runs.
"""
