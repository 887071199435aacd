"""Training of draft heads for a model, on text that the model wrote or would write."""
