"""Grammars that other processes compile, as the server has them compiled."""

from kvern.request.sampling_params import StructuredOutput
from kvern.structured.apart import GrammarProcesses
from kvern.structured.grammar import Grammars, NotCompiled


async def compiled_apart(
    processes: GrammarProcesses, grammars: Grammars, form: StructuredOutput, owner: str = "owner"
) -> str:
    """The grammar of a form. Raises InvalidParameter or ServerBusy."""
    while True:
        try:
            return grammars.compile(form)
        except NotCompiled as missing:
            wanted = missing.form
        await processes.compile(wanted, owner)
