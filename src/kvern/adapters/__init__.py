"""LoRA adapters: low-rank updates of a model's linear layers; requests with different adapters share a batch.

names.py   names and keys of adapters          places.py  which adapters are on the device, decided by the scheduler
peft.py    their files, checked                bank.py    their weights in host memory and on the device
check.py   the process that parses untrusted files
"""
