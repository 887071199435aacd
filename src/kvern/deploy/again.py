"""A bundle made again: the same weights and options, or options that are tuned for another machine.

`kvern serve` starts the second as a process, `python -m kvern.deploy.again BUNDLE OUT`, as it imports no PyTorch.
"""

import dataclasses
import sys
from pathlib import Path

from kvern.deploy.description import Bundled, read_bundle
from kvern.deploy.stage import Asked, read_target
from kvern.errors import KvernError
from kvern.quantize.statistics import REPORT_NAME

FIXED = ("kv_cache_dtype", "served_model_name")
"""Options that another machine does not choose anew: answers depend on them."""


def same(bundled: Bundled, out: Path) -> Asked:
    """Returns what makes the same bundle: options are measured again only on another machine or version."""
    asked = _asked(bundled, out)
    bundle = bundled.bundle
    apart = bundled.differences()
    return dataclasses.replace(
        asked,
        model=_model(bundled) if not bundle.is_quantized else bundle.model,
        max_loss=bundle.max_loss,
        calibration=None if bundle.calibration is None else bundled.folder / bundle.calibration,
        options=None if apart else bundled.engine,
        fixed={name: bundled.engine[name] for name in FIXED if name in bundled.engine},
        mixture=bundled.folder / str(bundle.weights) / REPORT_NAME if bundle.is_quantized else None,
        expected=bundle.digest if bundle.is_quantized else bundle.identity,
    )


def tuned_here(bundled: Bundled, out: Path) -> Asked:
    """Returns what tunes the weights of a bundle, as they are, for this machine."""
    fixed = {name: bundled.engine[name] for name in FIXED if name in bundled.engine}
    return dataclasses.replace(_asked(bundled, out), model=_model(bundled), fixed=fixed, refers=True)


def _asked(bundled: Bundled, out: Path) -> Asked:
    bundle = bundled.bundle
    load = bundle.workload
    if load is not None and (bundled.folder / load).is_file():
        load = str(bundled.folder / load)
    return Asked(
        bundle.model,
        out,
        revision=bundle.revision,
        target=read_target(bundle.target),
        workload=load,
        memory=bundle.memory,
    )


def _model(bundled: Bundled) -> str:
    """Returns the model whose weights are served: of the bundle's folder, of the hub, or embedded."""
    weights = bundled.bundle.weights
    return bundled.bundle.model if weights is None else str(bundled.folder / weights)


def main() -> int:
    """Tunes; the exit code is that of `kvern deploy`."""
    from kvern.deploy.pipeline import deploy

    folder, out = map(Path, sys.argv[1:])
    try:
        outcome = deploy(tuned_here(read_bundle(folder), out), True, _say)
    except KvernError as error:
        _say(str(error))
        return 2
    for line in outcome.failed:
        _say(line)
    return int(bool(outcome.failed))


def _say(text: str) -> None:
    sys.stderr.write(f"kvern: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
