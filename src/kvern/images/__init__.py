"""Images in prompts: what a file is, and which tokens and pixels a model makes of it. No module here imports torch.

`file.py` reads headers and pixels and refuses files that are beyond `limits.py`, `parts.py` finds the file in a part of
a message, `addresses.py` fetches it from a host that is allowed, `settings.py` says what decides the pixels, `views.py`
which pictures are made of an image, and a file for each family (`pixtral.py`, `qwen.py`) what sizes it has. `prompt.py`
puts the tokens of images into a prompt, and `conversation.py` the images of messages. Pillow (`kvern[images]`) is
imported for the first image. Begin with `prompt.py`.
"""
