"""How the products of a single row are cut."""

from kvern.kernels.linear import MatvecShape


def matvec_shape(outputs: int, inputs: int, activated: bool = False) -> MatvecShape:
    """How the product of a matrix of this shape is cut; measured on an H200."""
    if activated:
        return MatvecShape(4, 512, 4, stages=4 if inputs > 2048 else 3)
    if outputs <= 2048 or inputs <= 2048:
        return MatvecShape(2, 1024, 4, unroll=2)
    return MatvecShape(4, 512, 4, unroll=2) if inputs < 8192 else MatvecShape(4, 512, 4, stages=3)
