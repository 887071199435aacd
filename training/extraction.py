"""Record extraction: a few sentences about one or more things, and the JSON object that says the same.

The keys come in the order the instruction names them; where it names none, the subject first and then in order of mention.
A key that the instruction names and the text does not mention is null.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training import words
from training.draw import Draw, Example, Message, article, assistant, system, user

Value = str | int | float


@dataclass(frozen=True)
class Field:
    """One key, its other names, a maker of values and the predicates that state it ("is {v} years old")."""

    keys: tuple[str, ...]
    value: Callable[[Draw], Value]
    predicates: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of record: the subject's keys, a maker of (subject, pronoun), introductions and fields."""

    name: str
    keys: tuple[str, ...]
    subject: Callable[[Draw], tuple[str, str]]
    introductions: tuple[str, ...]
    fields: tuple[Field, ...]


def thing(make: Callable[[Draw], str], pronoun: str = "It") -> Callable[[Draw], tuple[str, str]]:
    return lambda draw: (make(draw), pronoun)


def whole(low: int, high: int) -> Callable[[Draw], int]:
    return lambda draw: draw.randint(low, high)


def among(*items: str) -> Callable[[Draw], str]:
    return lambda draw: draw.choice(items)


def product_name(draw: Draw) -> str:
    name = draw.choice(words.OBJECTS)
    return (
        f"{words.made_up(draw).capitalize()} {name}" if draw.chance(0.5) else f"{draw.choice(words.ADJECTIVES)} {name}"
    )


def code(draw: Draw) -> str:
    return "".join(draw.choice("ABCDEFGHKLMNPRSTX") for _ in range(draw.randint(1, 3))) + str(draw.randint(10, 9999))


AGE = Field(
    ("age",),
    whole(1, 99),
    ("is {v} years old", "is {v}", "is {v} years of age", "turned {v} this year", "just turned {v}"),
)
PERSON = Kind("person", ("name", "person", "full_name"), words.person, ("This is {s}.", "Meet {s}.", "I met {s} yesterday.", "My friend is called {s}."), (
    AGE, AGE,
    Field(("city", "town", "home"), words.city, ("lives in {v}", "is from {v}", "comes from {v}", "has a flat in {v}", "moved to {v} last year")),
    Field(("job", "occupation", "profession"), among(*words.JOBS), ("works as {av}", "is {av}", "is {av} by trade", "has a job as {av}")),
    Field(("email", "email_address"), words.email, ("can be reached at {v}", "has the email address {v}", "uses the email {v}", "reads mail at {v}")),
    Field(("phone", "phone_number"), words.phone, ("has the phone number {v}", "can be called at {v}", "answers the phone at {v}")),
    Field(("hobby", "interest"), among(*words.HOBBIES), ("loves {v}", "likes {v}", "enjoys {v}", "spends weekends {v}", "is fond of {v}")),
    Field(("country", "nationality"), among(*words.COUNTRIES), ("was born in {v}", "grew up in {v}", "has a passport from {v}")),
    Field(("employer", "company"), words.company, ("works for {v}", "works at {v}", "is employed by {v}")),
    Field(("height_cm", "height"), whole(120, 210), ("is {v} cm tall", "measures {v} cm")),
    Field(("children",), whole(2, 6), ("has {v} children", "is the parent of {v} children")),
))  # fmt: skip
PRODUCT = Kind("product", ("product", "item", "name"), thing(lambda draw: "The " + product_name(draw)), ("We sell this: {s}.", "New in the shop: {s}."), (
    Field(("price", "cost"), words.price, ("costs {v} euros", "sells for {v} dollars", "is priced at {v}", "is on sale for {v} euros", "costs {v}")),
    Field(("color", "colour"), among(*words.COLORS), ("is {v}", "comes in {v}", "is painted {v}")),
    Field(("stock", "quantity"), whole(0, 500), ("is in stock with {v} pieces", "has {v} units left", "has a stock of {v}")),
    Field(("brand", "maker"), words.company, ("is made by {v}", "is a product of {v}", "comes from the brand {v}")),
    Field(("weight_kg", "weight"), whole(1, 60), ("weighs {v} kg", "has a weight of {v} kg")),
    Field(("warranty_years",), whole(2, 9), ("has a warranty of {v} years", "comes with {v} years of warranty")),
))  # fmt: skip
BOOK = Kind("book", ("title", "book"), thing(words.title), ("I just read {s}.", "Here is a book: {s}."), (
    Field(("author", "writer"), lambda draw: words.person(draw)[0], ("was written by {v}", "is a book by {v}", "is a novel by {v}")),
    Field(("year", "published"), whole(1850, 2039), ("was published in {v}", "came out in {v}", "appeared in {v}")),
    Field(("pages", "page_count"), whole(40, 990), ("has {v} pages", "is {v} pages long", "runs to {v} pages")),
    Field(("publisher",), words.company, ("was published by {v}", "is sold by {v}")),
    Field(("rating", "stars"), whole(2, 5), ("has a rating of {v} stars", "got {v} stars")),
))  # fmt: skip
EVENT = Kind("event", ("event", "name"), thing(lambda draw: "The " + draw.choice(words.ADJECTIVES) + " " + draw.choice(("concert", "meeting", "party", "fair", "workshop", "conference", "race", "dinner", "wedding", "exhibition"))), ("You are invited: {s}.",), (
    Field(("date", "day"), words.date, ("takes place on {v}", "is on {v}", "is planned for {v}", "will be held on {v}")),
    Field(("weekday",), among(*words.WEEKDAYS), ("falls on a {v}", "is held every {v}")),
    Field(("city", "place", "location"), words.city, ("takes place in {v}", "is held in {v}", "happens in {v}")),
    Field(("guests", "attendees"), whole(5, 900), ("expects {v} guests", "has {v} guests", "welcomes {v} people")),
    Field(("time", "start_time"), words.clock_time, ("starts at {v}", "begins at {v}", "opens at {v}")),
    Field(("price", "ticket_price"), words.price, ("costs {v} euros", "has tickets for {v} dollars")),
))  # fmt: skip
PET = Kind("pet", ("name", "pet"), words.first_name, ("We have a pet called {s}.", "This is {s}."), (
    AGE,
    Field(("species", "animal"), among(*words.PETS), ("is {av}", "is our {v}", "is a lovely {v}")),
    Field(("color", "colour"), among(*words.COLORS), ("is {v}", "has {v} fur", "is mostly {v}")),
    Field(("owner",), lambda draw: words.person(draw)[0], ("belongs to {v}", "lives with {v}", "is owned by {v}")),
    Field(("weight_kg", "weight"), whole(1, 60), ("weighs {v} kg",)),
    Field(("favorite_food",), among(*words.FRUITS, "fish", "carrots", "cheese", "bread", "hay", "rice"), ("loves to eat {v}", "eats {v} every day")),
))  # fmt: skip
ORDER = Kind("order", ("order_id", "order", "id"), thing(lambda draw: ("Order " if draw.chance(0.8) else "Invoice ") + (str(draw.randint(100, 99999)) if draw.chance(0.6) else code(draw))), ("We received {s}.",), (
    Field(("customer", "buyer"), lambda draw: words.person(draw)[0], ("was placed by {v}", "is for {v}", "came from {v}")),
    Field(("item", "product"), product_name, ("contains a {v}", "is for a {v}", "is about one {v}")),
    Field(("quantity", "count"), whole(1, 99), ("has {v} pieces", "contains {v} items")),
    Field(("total", "amount"), words.price, ("comes to {v} euros", "has a total of {v}", "costs {v} dollars in total")),
    Field(("date", "ordered_on"), words.iso_date, ("was placed on {v}", "is dated {v}")),
    Field(("status",), among("shipped", "pending", "cancelled", "delivered", "paid"), ("is {v}", "has the status {v}")),
))  # fmt: skip
TOWN = Kind("city", ("city", "name", "town"), thing(words.city), ("I visited {s}.",), (
    Field(("population", "inhabitants"), whole(200, 999999), ("has {v} inhabitants", "has a population of {v}", "is home to {v} people")),
    Field(("river",), lambda draw: words.made_up(draw).capitalize(), ("lies on the river {v}", "is on the {v} river")),
    Field(("mayor",), lambda draw: words.person(draw)[0], ("is led by mayor {v}", "has a mayor called {v}")),
    Field(("country",), lambda draw: draw.choice(words.COUNTRIES), ("is a city in {v}", "is in {v}", "lies in {v}")),
    Field(("founded", "founding_year"), whole(800, 1990), ("was founded in {v}", "dates from {v}")),
))  # fmt: skip
FLIGHT = Kind("flight", ("flight", "flight_number"), thing(lambda draw: "Flight " + code(draw)), ("Please note {s}.",), (
    Field(("origin", "from"), words.city, ("leaves from {v}", "departs from {v}", "starts in {v}")),
    Field(("destination", "to"), words.city, ("goes to {v}", "flies to {v}", "lands in {v}")),
    Field(("departure", "departure_time"), words.clock_time, ("leaves at {v}", "departs at {v}", "takes off at {v}")),
    Field(("gate",), lambda draw: draw.choice("ABCDEF") + str(draw.randint(1, 40)), ("boards at gate {v}", "leaves from gate {v}")),
    Field(("seats", "free_seats"), whole(0, 200), ("has {v} free seats", "has {v} seats left")),
))  # fmt: skip
KINDS = (PERSON, PERSON, PERSON, PRODUCT, BOOK, EVENT, PET, ORDER, TOWN, FLIGHT)
PREFIXES = ("The ", "Order ", "Invoice ", "Flight ")
FILLERS = ("It was a nice day.", "Thank you for reading.", "That is all for now.", "Here is what I know.", "Please take note.", "Good to know.",
           "We talked for a while.", "More details will follow.")  # fmt: skip
TAILS = (
    " these days",
    " as far as I know",
    ", they say",
    " according to the list",
    " now",
    " as you know",
    ", I think",
    " with great success",
)
FREE = (
    "Extract the record as JSON: {t}", "Extract as JSON: {t}", "As JSON: {t}", "Return JSON for: {t}", "Extract the record as JSON.\n{t}", "Extract the data as JSON: {t}", "Turn this into JSON: {t}",
    "Convert to JSON: {t}", "Give me the record in JSON.\n\n{t}", "{t}\n\nExtract the record as JSON.", "{t} Return this as JSON.",
    "Write this record as a JSON object: {t}", "Make a JSON record of this text: {t}", "Extract all fields as JSON.\nText: {t}", "JSON please: {t}",
    "What are the facts here, as JSON? {t}", "Extract a JSON record from the text below.\n{t}", "Extract: {t}", "Parse this into JSON: {t}",
    "Please extract the {k} as JSON: {t}", "Extract the {k} record: {t}", "Read the text and answer with JSON only.\n{t}",
)  # fmt: skip
KEYED = (
    "Extract the fields {f} as JSON: {t}", "Extract {f} from this text as JSON: {t}", "Return a JSON object with the keys {f}.\n{t}",
    "{t}\nGive me {f} as JSON.", "From the text, extract {f}. Answer in JSON.\nText: {t}", "Fields: {f}\nText: {t}\nJSON:",
    "Extract a JSON object with {f}.\n\n{t}", "Read this: {t}\nWhich {f}? Answer as JSON.", "Please give {f} in JSON: {t}", "Extract {f}: {t}", "Extract {f} as JSON.\n{t}", "Extract {f} as JSON from: {t}", "I need {f} as JSON. {t}",
)  # fmt: skip
SCHEMA = ("Extract data that matches this JSON schema: {j}\nText: {t}", "{t}\n\nAnswer with JSON for this schema:\n{j}",
          "Schema: {j}\n{t}", "Use the schema {j} to extract a record from: {t}")  # fmt: skip
SYSTEMS = ("You extract records as JSON.", "Extract the record from each message as JSON. Answer with JSON only.", "You turn text into JSON.",
           "You are a data extraction service. Every answer is one JSON object.", "Reply only with the JSON record of the user's text.")  # fmt: skip


def bare(subject: str) -> str:
    """The subject as the record holds it: without the article or the kind's word in front."""
    for prefix in PREFIXES:
        if subject.startswith(prefix):
            return (
                subject
                if prefix == "The " and subject[4].isupper() and " " not in subject[4:]
                else subject.removeprefix(prefix)
            )
    return subject


@dataclass
class Record:
    """What was drawn: the subject, its pronoun and the stated fields in order of mention."""

    kind: Kind
    subject: str
    pronoun: str
    stated: list[tuple[Field, Value]]

    def title(self) -> str:
        return self.subject if self.kind is BOOK else bare(self.subject)


def record_key(record: Record) -> tuple[object, ...]:
    return ("record", record.title(), *(value for _, value in record.stated))


def draw_record(draw: Draw, kind: Kind, most: int = 5) -> Record:
    subject, pronoun = kind.subject(draw)
    fields: list[Field] = []
    for candidate in draw.some(kind.fields, 1, min(most, draw.choice((1, 2, 3, 3, 4, 5)))):
        if all(candidate.keys[0] != chosen.keys[0] for chosen in fields):
            fields.append(candidate)
    return Record(kind, subject, pronoun, [(chosen, chosen.value(draw)) for chosen in fields])


def predicate(draw: Draw, stated: Field, value: Value) -> str:
    text = draw.choice(stated.predicates)
    return text.replace("{av}", article(str(value))).replace("{v}", str(value))


def first_person(text: str) -> str:
    """A predicate as its subject says it: "has a flat" becomes "have a flat"."""
    verb, rest = text.split(" ", 1)
    verb = {"is": "am", "has": "have", "was": "was"}.get(verb, verb.removesuffix("s"))
    return f"{verb} {rest}"


def tell(draw: Draw, record: Record) -> str:
    """The record in words: sentences of one or two predicates, or a list of "key: value"."""
    if draw.chance(0.07):
        pairs = [f"{record.kind.keys[0]}: {record.title()}"] + [
            f"{stated.keys[0]}: {value}" for stated, value in record.stated
        ]
        return draw.choice((", ", "\n", "; ")).join(pairs)
    predicates = [predicate(draw, stated, value) for stated, value in record.stated]
    sentences, subject = [], record.subject
    if draw.chance(0.15):
        sentences.append(
            draw.choice(record.kind.introductions).format(
                s=subject if subject[:4] != "The " or record.kind is BOOK else "t" + subject[1:]
            )
        )
        subject = record.pronoun
    elif record.kind is PERSON and draw.chance(0.2):
        sentences.append(
            draw.choice(("My name is {s}.", "I am {s}.", "Hello, I'm {s}.", "I am called {s}.")).format(s=subject)
        )
        predicates = [first_person(text) for text in predicates]
        if predicates[0].startswith("am ") and draw.chance(0.6):
            sentences[0] = (
                sentences[0][:-1] + draw.choice((" and I'm ", ", I'm ", " and I am ")) + predicates.pop(0)[3:] + "."
            )
        record = Record(record.kind, "I", "I", record.stated)
        subject = "I"
    elif record.stated[0][0] is AGE and draw.chance(0.3):
        age = record.stated[0][1]
        opening = draw.choice(
            (
                f"{subject}, {age},",
                f"{subject} ({age})",
                f"{subject}, aged {age},",
                f"{subject}, {age} years old,",
                f"At {age}, {subject}",
                f"At the age of {age}, {subject}",
            )
        )
        if len(predicates) > 1:
            sentences.append(f"{opening} {predicates[1]}.")
            predicates, subject = predicates[2:], record.pronoun
    while predicates:
        take = predicates[: draw.choice((1, 1, 1, 2, 2, 3))]
        predicates = predicates[len(take) :]
        said = take[0] if len(take) == 1 else ", ".join(take[:-1]) + " and " + take[-1]
        sentences.append(f"{subject} {said}{draw.choice(TAILS) if draw.chance(0.07) else ''}.")
        subject = record.subject if draw.chance(0.2) else record.pronoun
    if draw.chance(0.12):
        sentences.insert(draw.choice((0, len(sentences))), draw.choice(FILLERS))
    return " ".join(sentences)


def free_json(record: Record) -> dict[str, Any]:
    return {record.kind.keys[0]: record.title()} | {stated.keys[0]: value for stated, value in record.stated}


def keyed(draw: Draw, record: Record, text: str) -> tuple[str, dict[str, Any]]:
    """A prompt that names the keys, perhaps fewer, renamed or absent ones, and its answer."""
    keys: list[tuple[tuple[str, ...], Value | None]] = [(record.kind.keys, record.title())] if draw.chance(0.9) else []
    keys += [(stated.keys, value) for stated, value in record.stated if draw.chance(0.85)]
    if not keys or draw.chance(0.15):
        spoken = {stated.keys[0] for stated, _ in record.stated} | {record.kind.keys[0]}
        absent = [other.keys for other in record.kind.fields if other.keys[0] not in spoken]
        keys += [(draw.choice(absent), None)] if absent else []
    keys = keys or [(record.kind.keys, record.title())]
    if draw.chance(0.3):
        draw.shuffle(keys)
    answer: dict[str, Any] = {}
    for names, value in keys:
        answer[
            next(
                name
                for name in ((draw.choice(names) if draw.chance(0.3) else names[0]), *names, names[0] + "_2")
                if name not in answer
            )
        ] = value
    if draw.chance(0.3):
        kinds = {key: {"type": "string" if value is None else _json_type(value)} for key, value in answer.items()}
        schema = {"type": "object", "properties": kinds, "required": list(answer)} if draw.chance(0.6) else kinds
        return draw.choice(SCHEMA).format(j=json.dumps(schema), t=text), answer
    named = [f'"{key}"' for key in answer] if draw.chance(0.3) else list(answer)
    listed = ", ".join(named) if draw.chance(0.5) or len(named) == 1 else ", ".join(named[:-1]) + " and " + named[-1]
    return draw.choice(KEYED).format(f=listed, t=text), answer


def _json_type(value: Value) -> str:
    return {str: "string", int: "integer", float: "number"}[type(value)]


def extraction(draw: Draw) -> Example:
    kind = draw.choice(KINDS)
    record = draw.split(lambda: draw_record(draw, kind), record_key)
    text = tell(draw, record)
    messages: list[Message] = []
    way = draw.random()
    answer: Any
    if way < 0.45:
        prompt, answer = draw.choice(FREE).format(t=text, k=kind.name), free_json(record)
    elif way < 0.83:
        prompt, answer = keyed(draw, record, text)
    elif way < 0.91:
        messages, prompt, answer = (
            ([system(draw.choice(SYSTEMS))] if draw.chance(0.85) else []),
            text,
            free_json(record),
        )
    else:
        records = [draw.split(lambda: draw_record(draw, kind, most=1), record_key) for _ in range(draw.randint(2, 3))]
        text = " ".join(f"{r.subject} {predicate(draw, *r.stated[0])}." for r in records)
        record = records[0]
        prompt = draw.choice(
            (
                "Extract all records as a JSON array: {t}",
                "Extract a list of JSON records: {t}",
                "{t}\nReturn all records as a JSON list.",
            )
        )
        prompt, answer = prompt.format(t=text), [free_json(r) for r in records]
    return Example(
        "extraction",
        [*messages, user(prompt), assistant(json.dumps(answer, ensure_ascii=False))],
        key=record_key(record),
    )
