"""Plans of `kvern quantize` in which all matrices have one scheme."""

from kvern.quantize.checkpoint import Checkpoint
from kvern.quantize.job import Plan, check_plan
from kvern.quantize.scheme import Scheme


def uniform_plan(checkpoint: Checkpoint, scheme: Scheme) -> Plan:
    """Every matrix in one scheme. Raises ConfigError if its groups do not divide one."""
    plan = dict.fromkeys(checkpoint.matrices, scheme)
    check_plan(checkpoint, plan)
    return plan
