"""The last stage: weights where they are to be, and `deploy.toml`, which makes the folder a bundle."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from kvern.deploy.description import FORMAT, NAME, Description, as_toml, contents_of, device_names, read_bundle
from kvern.deploy.discover import Discovered
from kvern.deploy.journal import write_whole
from kvern.deploy.quantize import WEIGHTS, Quantized
from kvern.deploy.shard import Sharded
from kvern.deploy.stage import Part, Work, as_target
from kvern.deploy.tune import Tuned, engine_options
from kvern.errors import ConfigError
from kvern.formats.gguf.files import split_files
from kvern.models.hub import EMBEDDED_FOLDER
from kvern.quantize.writer import placing
from kvern.version import __version__


class Finished(msgspec.Struct):
    """The bundle's file, the options of its engines, and the command that makes it again."""

    file: str
    engine: dict[str, Any]
    again: str


class Bundle:
    """The seventh stage."""

    name = "bundle"
    result = Finished

    def inputs(self, work: Work) -> Mapping[str, Any]:
        """The notes about the question, and the place of the bundle."""
        return {**work.asked.identity, "out": str(work.asked.out.absolute())}

    def run(self, work: Work) -> Finished:
        """Copies weights of a folder, and writes the description. Raises KvernError."""
        asked = work.asked
        found = work.of(Discovered)
        quantized = work.of(Quantized)
        weights = quantized.folder or self._copied(work)
        engine = {name: value for name, value in served_options(work).items() if value not in (None, "auto", [], ())}
        workload = self._kept(work, None if asked.workload is None else Path(asked.workload), "workload")
        bundle = Description(
            format=FORMAT,
            model=found.model,
            kvern=__version__,
            torch=str(torch.__version__),
            devices=device_names(),
            weights=weights,
            revision=found.revision,
            digest=quantized.digest or None,
            identity=found.identity,
            is_quantized=quantized.folder is not None,
            max_loss=asked.max_loss,
            target=as_target(asked.target) or None,
            workload=workload or asked.workload,
            calibration=self._kept(work, asked.calibration, "calibration"),
            memory=asked.memory,
            files=[] if not weights else contents_of(*(work.folder / weights).iterdir()),
        )
        again = f"kvern deploy {asked.out / NAME} --out ANOTHER"
        comments = [f"{found.name}, made by kvern {__version__}", f"kvern serve {asked.out}", again]
        write_whole(work.folder / NAME, as_toml(bundle, engine, comments))
        return Finished(NAME, engine, again)

    def _kept(self, work: Work, file: Path | None, name: str) -> str | None:
        """Copies a file that was given into the bundle; returns its name there."""
        if file is None or not file.is_file():
            return None
        kept = f"{name}{file.suffix}"
        write_whole(work.folder / kept, file.read_bytes())
        return kept

    def _copied(self, work: Work) -> str | None:
        """Returns the folder of weights that have no other place: those of a model in a folder, which may change."""
        found = work.of(Discovered)
        source = Path(work.of(Sharded).folder)
        if found.revision is not None or source.parent == EMBEDDED_FOLDER or work.asked.refers:
            return None
        files = split_files(source) if source.is_file() else sorted(filter(Path.is_file, source.iterdir()))
        with placing(work.folder / WEIGHTS) as made:
            for path in files:
                shutil.copyfile(path, made / path.name)
            if contents_of(*made.iterdir()) != contents_of(*files):
                raise ConfigError(
                    f"the copy of {source} is not equal to it: it changed meanwhile, or a disk has faults"
                )
        return WEIGHTS

    def stands(self, work: Work, result: Finished) -> bool:
        """True if the description and the files of weights are there, as they were."""
        try:
            read_bundle(work.folder).check_contents()
        except ConfigError:
            return False
        return True

    def report(self, result: Finished) -> Part:
        """The commands that take the bundle."""
        rows = [(name, str(value)) for name, value in result.engine.items()]
        return Part([*rows, ("again", result.again)])


def served_options(work: Work) -> dict[str, Any]:
    """Returns the options of `kvern serve`, without the model and folders of this machine."""
    options = engine_options(work) | work.of(Tuned).options
    own = {name: value for name, value in options.items() if name != "model"}
    return {**own, "served_model_name": work.asked.fixed.get("served_model_name", [work.of(Discovered).name])}
