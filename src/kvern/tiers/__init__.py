"""Tiers of the KV cache: stores that keep pages outside the device.

`store.py` says what a store is (`Store`), and makes one from an option. `shelf.py` is an engine's ordered list of
stores: it decides what is loaded by their prices (`price.py`), checks pages (`pages.py`) and counts them.
The stores are `host.py`, `disk.py` (with `page_folder.py`), `valkey.py` and `mooncake.py`. They import nothing
above `io` but `plugins`.
What moves pages between blocks and host memory is in `runner/` (`tier.py`), and who waits for them in `cache/tier.py`.

To add a store: a class with the methods of `Store` in a file here, and its maker in `STORES` of `store.py`, or in
another package as an entry point of the group `kvern.kv_tiers`. Tests: a row in `KINDS` of `tests/tiers/test_stores.py`
and in `test_engines_with_stores.py`. Docs: docs/kv-tiers.md. Begin with `store.py`, then `valkey.py`.
"""
