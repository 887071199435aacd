"""Quantization of a checkpoint, layer by layer, to a folder that other engines load too.

    job.py              the options, checked before anything is read, the whole run, and the codes' stored form
      calibration.py    texts -> rows of token ids
      checkpoint.py     a model's folder as blocks: names, shapes, and one block's tensors at a time
      blocks.py         Block: one layer on the device with its matrices' inputs; the unit of AWQ and of the walk
        watched.py      linear layers and experts that record Inputs, the statistics of what they multiply
      scheme.py         Scheme: the stored form of a matrix (bits, groups, symmetric or not); Grid: its scales
      method.py         Method: weights, inputs and a scheme -> Rounded, to nearest or by GPTQ; awq.py
      writer.py         the folder: shards written as tensors come, other files copied, renamed at the end
      statistics.py     figures of each matrix; the report

A plan, `{matrix's name in the checkpoint: Scheme}`, lists all that is quantized; other matrices stay plain. So a run
with one scheme and a mixed one are the same run (`job.quantize`).
"""
