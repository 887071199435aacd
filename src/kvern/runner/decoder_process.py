"""A process that decodes images in children that may die: `python -m kvern.runner.decoder_process DESCRIPTOR FOLDER`.

    engine --files--> child: the pixels of the patches, in memory that both have --descriptor of it--> engine

The memory and the computing time of a child grow with the size that the header of its file says. A signal ends one that
computes for too long. No torch is imported.
"""

import mmap
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path

from kvern.errors import InvalidRequest
from kvern.images.file import ImageFile, Pixels, read_file
from kvern.images.settings import ImageSettings, settings_of
from kvern.io.children import READY, fork_children, give_way, limit_memory, receive, send
from kvern.io.files import read_object
from kvern.models.image_models import vision_of

MEMORY = 128 << 20
"""Bytes that any image may take, besides PIXEL_BYTES for each pixel."""
PIXEL_BYTES = 48
SECONDS = 2.0
"""Computing time that any image may take, besides PIXEL_SECONDS for each pixel."""
PIXEL_SECONDS = 4e-7
DECODED = b"decoded"
"""The answer that comes with a descriptor; another says what is wrong."""


def main(descriptor: int, folder: Path) -> None:
    """Fork a child for every socket that arrives, until the engine ends. All of them give way to the engine."""
    give_way(5)
    with socket.socket(fileno=descriptor) as control:
        vision = vision_of(read_object(folder / "config.json"))
        assert vision is not None, "the model reads no images"
        fork_children(control, partial(serve, settings=settings_of(folder, vision)))


def serve(connection: socket.socket, settings: ImageSettings) -> None:
    """Decodes the files that arrive, until the engine closes the socket."""
    from PIL import Image  # what it imports at the first image is no part of an image's memory

    Image.init()
    connection.sendall(READY)
    while (data := receive(connection)) is not None:
        limit_memory(MEMORY)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            file = read_file(data, "an image")
            limit_memory(MEMORY + PIXEL_BYTES * file.width * file.height)
            signal.setitimer(signal.ITIMER_PROF, seconds_of(file))  # its signal ends the process
            shared = in_shared_memory(settings.patches(file))
        except InvalidRequest as error:
            send(connection, str(error).encode())
        except MemoryError:
            send(connection, f"an image takes more memory than {PIXEL_BYTES} bytes a pixel: send another".encode())
            return
        else:
            send(connection, DECODED, [shared])
            os.close(shared)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def seconds_of(file: ImageFile) -> float:
    """Returns the computing time that a file may take."""
    return SECONDS + PIXEL_SECONDS * file.width * file.height


def in_shared_memory(patches: Pixels) -> int:
    """Returns the descriptor of memory with these pixels."""
    shared = os.memfd_create("image")
    os.ftruncate(shared, patches.nbytes)
    with mmap.mmap(shared, patches.nbytes) as memory:
        memory[:] = patches.tobytes()
    return shared


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
