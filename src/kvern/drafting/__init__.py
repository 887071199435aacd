"""Speculation: proposers, draft models and draft heads, their costs, and the verification of drafts.

`proposer.py` is the protocol of proposers on the host and `drafting.py` decides how many drafts a request gets; both
are without torch. `models/` has draft heads as modules, `device/` what drafts beside the model on its device.
"""
