"""Traces: the spans of requests, sent to a collector of OpenTelemetry.

`request_spans.py` makes spans (`spans.py`) of a request's records when it has ended, and chooses which requests are
traced. `sending.py` queues them in the server's process, and `exporter.py` is a process of its own that sends them: it
alone imports OpenTelemetry's SDK, an extra. Imports plain data only. Begin with `request_spans.py`.
"""
