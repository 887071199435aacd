"""Tiers of the KV cache: stores that keep pages outside the device.

`store.py` says what a store is, and makes one from an option. The stores import nothing above `io`. They lie, fail and
are late; who uses them checks every page. A store of another package is an entry point of the group `kvern.kv_tiers`.
"""
