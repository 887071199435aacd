"""The processes of all ranks but the first, the messages to them, and experts that move between them.

`rank_processes.py` starts and watches them, `rank_process.py` is such a process (a `Worker` that receives steps), and
`rank_wire.py` has the messages. `rank_sums.py` chooses how rows are added up, and `expert_balance.py` and
`expert_moves.py` give experts other places while the engine runs.
"""
