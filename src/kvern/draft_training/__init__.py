"""Training of draft heads for a model, on text that the model wrote or would write.

`job.py` reads the text, runs the model and trains, and has the head while it is trained. `kvern train-eagle`
uses it.
"""
