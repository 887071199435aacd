"""The percentile that all benchmarks report."""

from collections.abc import Sequence

import numpy as np


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns a percentile, interpolated linearly between the two nearest values; 0 if there are no values."""
    return float(np.percentile(values, percent)) if values else 0.0
