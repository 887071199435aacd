"""A bundle made again: the same weights and options, or options that are tuned for another machine.

`kvern serve` starts the second as a process, `python -m kvern.deploy.again BUNDLE OUT`, as it imports no PyTorch.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from kvern.cache.keys import model_identity
from kvern.deploy.description import Bundled, read_bundle
from kvern.deploy.stage import Asked, read_target
from kvern.errors import ConfigError, KvernError
from kvern.planning.estimate import Split
from kvern.quantize.statistics import REPORT_NAME

CHOSEN = {
    *("max_batch_tokens", "max_batch_requests", "proposer", "target_itl", "kv_tier", "kv_cache_tokens"),
    *Split(1, 1).options,
}
"""Options that another machine chooses anew; it keeps all others, such as the format of the KV cache."""


def same(bundled: Bundled, out: Path) -> Asked:
    """Returns what makes the same bundle: options are measured again only on another machine or version."""
    bundle = bundled.bundle
    if not bundle.is_quantized:
        bundled.check_contents()
    elif Path(bundled.source).is_absolute() and _identity(Path(bundled.source)) != bundle.identity:
        raise ConfigError(
            f"{bundled.folder} names {bundled.source} as its model, and it is not that of which the bundle was made: "
            "its files are others, or it is not here"
        )
    asked = _asked(bundled, out)
    apart = bundled.differences()
    return dataclasses.replace(
        asked,
        model=bundled.source if bundle.is_quantized else bundled.model,
        max_loss=bundle.max_loss,
        calibration=None if bundle.calibration is None else bundled.folder / bundle.calibration,
        options=None if apart else bundled.engine,
        fixed=_fixed(bundled),
        mixture=bundled.folder / str(bundle.weights) / REPORT_NAME if bundle.is_quantized else None,
        expected=bundle.digest if bundle.is_quantized else bundle.identity,
    )


def _identity(model: Path) -> str:
    try:
        return model_identity(model).hex()
    except (OSError, ValueError, KvernError):
        return ""


def tuned_here(bundled: Bundled, out: Path) -> Asked:
    """Returns what tunes the weights of a bundle, as they are, for this machine."""
    asked = dataclasses.replace(_asked(bundled, out), model=bundled.model, fixed=_fixed(bundled), refers=True)
    return asked if bundled.bundle.weights is None else dataclasses.replace(asked, revision=None)


def _fixed(bundled: Bundled) -> dict[str, Any]:
    return {name: value for name, value in bundled.engine.items() if name not in CHOSEN}


def _asked(bundled: Bundled, out: Path) -> Asked:
    bundle = bundled.bundle
    load = bundle.workload
    if load is not None and os.path.isfile(bundled.folder / load):
        load = str(bundled.folder / load)
    elif load is not None and os.path.exists(load):
        raise ConfigError(
            f"{bundled.folder} has {load} as workload, which is not in the bundle, and {Path(load).absolute()} is "
            "another file: start in another working directory"
        )
    return Asked(
        bundle.model,
        out,
        revision=bundle.revision,
        target=read_target(bundle.target),
        workload=load,
        memory=bundle.memory,
    )


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
