"""Formats of texts in JSON schemas, as ones that the grammar compilers know or as patterns."""

from typing import Any

YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
DAY = (
    f"(?:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{LEAP_YEAR}-02-29)"
)
FRACTION = "(?:[.][0-9]+)?"
HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
TIME = f"{HOUR}:[0-5][0-9]{FRACTION}(?:[Zz]|[+-]{HOUR})"
LEAP_SECOND = f"23:59:60{FRACTION}(?:[Zz]|[+-]00:00)"
"""Seconds are inserted at the end of a day in UTC, by RFC 3339 of the last day of June or December."""

FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{DAY}$"},
    "time": {"pattern": f"^(?:{TIME}|{LEAP_SECOND})$"},
    "date-time": {"pattern": f"^(?:{DAY}[Tt]{TIME}|{YEAR}-(?:06-30|12-31)[Tt]{LEAP_SECOND})$"},
    **{name: {"format": name} for name in ("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "regex")},
    "idn-email": {"format": "email"},
    "idn-hostname": {"format": "hostname"},
    "iri": {"format": "uri"},
    "iri-reference": {"format": "uri"},
    "uri-reference": {"format": "uri"},
    "uri-template": {"format": "uri"},
    "json-pointer": {"pattern": "^(/([^~/]|~[01])*)*$"},
    "relative-json-pointer": {"pattern": "^(0|[1-9][0-9]*)(#|(/([^~/]|~[01])*)*)$"},
}
"""A schema for each format, which may be narrower than the standard; other formats assert nothing."""
