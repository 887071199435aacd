"""What the server keeps on disk and in memory: files, batches, responses and conversations."""
