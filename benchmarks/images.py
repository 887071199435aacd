"""What reading images costs. Each subcommand measures one part and writes its figures as JSON.

python benchmarks/images.py answers        a picture and its answer on a CPU, beside transformers
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

COMMANDS = {"answers": "benchmarks.image_answers"}
"""The module of each subcommand, which has `add_arguments(parser)` and `run(arguments)`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subcommands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        importlib.import_module(module).add_arguments(subcommands.add_parser(name))
    arguments = parser.parse_args()
    importlib.import_module(COMMANDS[arguments.command]).run(arguments)


if __name__ == "__main__":
    main()
