"""LoRA adapters: small changes of a model's linear layers, many of which share one batch.

names.py   what the user calls them           places.py  which of them are on the device, decided by the scheduler
peft.py    their files, checked               bank.py    their weights on the device, and the rows that use them
store.py   in host memory, by key
"""
