"""References of JSON schemas that lead back to themselves."""

from collections.abc import Iterator
from typing import Any

from kvern.errors import InvalidParameter

SAME_VALUE = ("allOf", "anyOf", "oneOf")
"""Keywords whose subschemas describe the value itself, not a part of it."""
LONGEST_INDEX = 10
"""The most digits of a list index."""


def check_references(schema: Any) -> None:
    """Raises InvalidParameter if a reference leads to itself without describing a part of the value in between."""
    ended: set[int] = set()
    for start in _objects(schema):
        if id(start) in ended:
            continue
        path, places = [(start, _same_value(start, schema))], {id(start): 0}
        while path:
            place, following = path[-1]
            name, target = next(following, ("", {}))
            if not name:
                path.pop()
                del places[id(place)]
                ended.add(id(place))
            elif id(target) in places:
                raise InvalidParameter(
                    f"structured: the schema's {name} leads back to itself and describes no value: let it refer to a "
                    "schema with a type"
                )
            elif id(target) not in ended:
                places[id(target)] = len(path)
                path.append((target, _same_value(target, schema)))


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema's objects at any depth."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _same_value(schema: dict[str, Any], root: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas that a value of this one must or may follow, and how they are named."""
    reference = schema.get("$ref")
    if isinstance(reference, str):
        target = pointed_at(reference, root)
        if isinstance(target, dict):
            yield f"$ref {reference[:200]!r}", target
    for name in SAME_VALUE:
        several = schema.get(name)
        for target in several if isinstance(several, list) else ():
            if isinstance(target, dict):
                yield name, target


def pointed_at(reference: str, root: Any) -> Any:
    """The target of a JSON pointer within the schema; None for other references and missing targets."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and len(key) < LONGEST_INDEX and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict):
            found = found.get(key)
        else:
            return None
    return found
