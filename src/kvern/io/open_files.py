"""The limit of a process's open files, of which each connection is one."""

import contextlib
import resource

ENOUGH = 1 << 16
"""More than any server or load test has connections; a limit far above makes some programs slow."""


def raise_limit() -> int:
    """Raises the limit as far as the system allows and as is of use, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return soft
