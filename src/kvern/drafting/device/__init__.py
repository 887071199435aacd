"""Drafters on the device beside the model, and their CUDA graphs."""
