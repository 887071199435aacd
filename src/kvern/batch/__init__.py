"""Offline batch jobs: a file of requests in, a file of answers out, resumable at any moment.

readers  rows out of JSONL, CSV or Parquet, one at a time
requests a row becomes a prompt with sampling parameters, an answer becomes a row (plain, or OpenAI batch format)
journal  what is done, on disk, such that a killed job goes on where it stopped
tables   the journal becomes a CSV or Parquet file when all rows are done
display  progress bar and closing table
job      ties them together around one engine
"""
