"""Speculation: proposers, draft models and draft heads, their costs, and the verification of drafts.

`proposer.py` is the protocol of proposers on the host, `drafting.py` decides how many drafts a request gets, and
`costs.py` learns what drafts cost and gain; none of them needs torch. `verification.py` and `rejection.py` decide
which drafts are kept. `device/` has drafters that run beside the model on its device, `models/` draft heads as
modules, and their checkpoints.

To add a proposer: a file with a class that has `propose`, and its entry in `OWN` in `proposer.py`, or an entry point
of the group `kvern.proposers`. Begin with `proposer.py`, then `ngram.py`.
"""
