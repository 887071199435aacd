"""Metrics: counters and histograms, made of token events and of statistics that the engine sends.

Imports plain data only, so that the server's process needs no torch. Begin with `metrics.py`.
"""
