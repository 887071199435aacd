"""The shapes of the kernels that multiply a single row."""

from kvern.kernels.linear import MatvecShape, StreamShape


def matvec_shape(outputs: int, inputs: int, activated: bool = False) -> MatvecShape:
    """The kernel's shape for a matrix of this size; measured on an H200."""
    if activated:
        return MatvecShape(4, 512, 4, stages=4 if inputs > 2048 else 3)
    if outputs <= 2048 or inputs <= 2048:
        return MatvecShape(2, 1024, 4, unroll=2)
    return MatvecShape(4, 512, 4, unroll=2) if inputs < 8192 else MatvecShape(4, 512, 4, stages=3)


def streamed_row(outputs: int, inputs: int) -> StreamShape | None:
    """The shape in which a rank streams the product of one row on Hopper; None: a matrix-vector product is as fast.

    Memory rests while ranks sum, and during the attention of one request. A ring of shared memory in two programs of
    each processor takes more of the weights meanwhile than registers do: 25 MB instead of 9.
    """
    if outputs < 8192:
        return None
    return StreamShape(8, 64, 128, 6, 2 if inputs >= 4096 else 1)
