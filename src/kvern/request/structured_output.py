"""The form of a structured answer in a request."""

from typing import Any

import msgspec

from kvern.errors import InvalidParameter

KINDS = ("json", "regex", "choice", "grammar")
MOST_CHOICES = 10_000


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of four forms. Raises InvalidParameter if none or several are given."""

    json: dict[str, Any] | bool | None = None
    """JSON that this schema describes (draft 2020-12); True: any JSON object."""
    regex: str | None = None
    """Text that this regular expression matches as a whole."""
    choice: list[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """Text that this grammar derives, in Lark's notation (or GBNF, which has `::=`)."""
    parts: "dict[str, StructuredOutput] | None" = None
    """Further forms, which a grammar in Lark's notation refers to as `@NAME`."""

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            names = ", ".join(KINDS)
            raise InvalidParameter(f"structured has {', '.join(given) or 'nothing'}: give exactly one of {names}")
        if self.json is False:
            raise InvalidParameter("structured: the schema false allows no value at all")
        if self.choice is not None and not 0 < len(self.choice) <= MOST_CHOICES:
            raise InvalidParameter(f"structured: choice has {len(self.choice)} texts: give 1 to {MOST_CHOICES}")
        if "" in (self.choice or ()):
            raise InvalidParameter("structured: choice holds an empty text: leave it out")
        if self.parts is not None and (self.grammar is None or any(part.parts for part in self.parts.values())):
            raise InvalidParameter("structured: only a grammar has parts, and they have none themselves")
