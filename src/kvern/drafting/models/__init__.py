"""Draft heads and draft models: their checkpoints, and their modules."""
