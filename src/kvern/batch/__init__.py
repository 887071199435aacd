"""Offline batch jobs: a file of requests in, a file of answers out. A job can be stopped and resumed at any time.

readers   rows of JSONL, CSV or Parquet, one at a time
requests  rows as prompts with sampling parameters, answers as rows (plain, or OpenAI's batch format)
images    the folder of images that rows name by paths
journal   the state of a job on disk, from which a killed job continues
tables    the journal as a CSV or Parquet file, when all rows are done
job       the loop that connects them with one engine
"""
