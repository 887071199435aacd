"""What a plain install can do, without other packages: `python -m tests.support.plain_install MODEL...`.

With `--methods fp8 int4` a model is quantized in these ways alone.

Every package that is installed here and that kvern does not depend on cannot be imported, Triton never. Each command,
server and registered part is imported, a model is quantized in every way, and what was written, a GGUF file, an encoder
and each MODEL answer on a CPU. A name of a MODEL that ends with `+dummy` has random weights, with `+encoder` it embeds.
"""

import argparse
import gc
import importlib
import pkgutil
import re
import sys
import tempfile
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

PACKAGES = "api", "batch", "cli", "engine", "models.families", "observe", "planning", "quantize", "server"
"""All of whose modules a CPU uses."""
METHODS: dict[str, list[str]] = {
    "fp8": [],
    "int8": [],
    "int4": ["--group-size", "32"],
    "awq": ["--group-size", "32"],
    "gptq": ["--group-size", "32"],
    "mixed": ["--max-loss", "9%"],
}
"""Ways to quantize, with what each is given."""


def name_of(requirement: str) -> str:
    """The name of a package in a requirement, as indexes spell it."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def dependencies(package: str, found: set[str]) -> set[str]:
    """The package and what it depends on without extras, and what these do."""
    if package not in found:
        found.add(package)
        try:
            for requirement in requires(package) or ():
                if "extra ==" not in requirement:
                    dependencies(name_of(requirement), found)
        except PackageNotFoundError:  # of another system
            pass
    return found


def missing() -> set[str]:
    """The modules that are installed here, and are not in a plain install."""
    kept = dependencies("kvern", set())
    homes = packages_distributions()
    return {module for module, names in homes.items() if not kept & {name_of(name) for name in names}} | {"triton"}


class Hiding:
    """A finder that does not find some modules."""

    def __init__(self, finder: Any, names: set[str]) -> None:
        self._finder, self._names = finder, names
        self.find_distributions = getattr(finder, "find_distributions", lambda *_: ())

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self._names:
            return None
        found: ModuleSpec | None = self._finder.find_spec(name, path, target)
        return found


def import_all() -> None:
    """Import each command, each server and all parts that are registered by name."""
    from kvern.plugins import Plugins

    for package in PACKAGES:
        for module in pkgutil.iter_modules(importlib.import_module(f"kvern.{package}").__path__):
            importlib.import_module(f"kvern.{package}.{module.name}")
    for part in gc.get_objects():
        if type(part) is Plugins:
            print(part.what, *part.names)


def answer(model: str) -> None:
    """Print the first tokens of an answer, or the numbers of an embedding."""
    from kvern import LLM, SamplingParams

    folder, _, kind = model.partition("+")
    load_format = "dummy" if kind == "dummy" else "auto"
    with LLM(folder, max_model_len=64, device="cpu", load_format=load_format) as llm:
        if kind == "encoder":
            print(model, len(llm.embed(["red foxes"])[0]))
        else:
            [output] = llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
            print(model, *output.outputs[0].token_ids)


def main() -> None:
    """Do all that."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    arguments = parser.parse_args()
    refused = missing()
    assert "torch" not in refused
    print("refused", *sorted(refused))
    sys.meta_path[:] = [Hiding(finder, refused) for finder in sys.meta_path]
    import_all()
    from kvern.cli.main import main as command
    from tests.support.encoders import make_random
    from tests.support.plain_gguf import write_plain_gguf
    from tests.support.tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory() as name:
        plain, models = make_tiny_model(Path(name) / "plain"), list(arguments.models)
        models.append(str(write_plain_gguf(plain.parent / "model.gguf")))
        models.append(f"{make_random('bert', plain.parent / 'encoder')}+encoder")
        (plain.parent / "words.txt").write_text("the quick brown fox " * 40)
        given = ["--calibration", str(plain.parent / "words.txt"), "--calibration-tokens", "32"]
        for method in arguments.methods:
            out = str(plain.parent / method)
            assert command(["quantize", str(plain), "--method", method, "--out", out, *given, *METHODS[method]]) == 0, (
                method
            )
            models.append(out)
        assert command(["models", str(plain)]) == 0
        for model in models:
            answer(model)


if __name__ == "__main__":
    main()
