"""The limits of images, for code that refuses them before any is opened."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
LARGEST_FILE = 20 << 20
MOST_PIXELS = 50_000_000
LONGEST_SIDE = 16_384
MOST_RATIO = 200
MOST_READS = 20_000
"""The most pieces of a header. Pillow reads some formats byte by byte, and a server's other threads wait meanwhile."""
MOST_IMAGES = 32
"""The most images of a conversation."""
LOW = b"low detail\0"
"""The mark before a file that is read in low detail. No format begins with it."""
LOW_SIDE = 512
"""The pixels on the longer side of a picture in low detail."""
