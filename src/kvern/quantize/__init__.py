"""Quantizes a checkpoint, layer by layer: reads plain weights, calibrates, writes a folder that others load as well.

    job.py              what is asked, checked before anything is read; the whole run
      calibration.py    texts -> rows of token ids
      checkpoint.py     a model's folder as blocks: names, shapes, and one block's tensors at a time
      blocks.py         Block: one layer on the device, what its matrices multiply, AWQ's and the walk's unit
        inputs.py       Inputs: statistics of what a matrix multiplies
        watched.py      linear layers and experts that tell their Inputs what they multiply
      scheme.py         Scheme: how a matrix is stored (bits, groups, symmetric or not)
      grid.py           Grid: a scheme's scales for one matrix; rounds numbers to codes and back
      method.py         Method: weights, inputs and a scheme -> Rounded; round_to_nearest.py, gptq.py, awq.py
      packing.py        Rounded -> the tensors that a checkpoint holds; the quantization_config
      writer.py         the folder: shards written as tensors come, other files copied, renamed at the end
      statistics.py     what is told of each matrix; the report

A plan, `{matrix's name in the checkpoint: Scheme}`, says all that is quantized; what it does not name stays plain. So a
run with one scheme and a mixed one are the same run (`job.quantize`).
"""
