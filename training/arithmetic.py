"""Addition and subtraction of numbers up to three digits, and sorting and counting of short lists."""

from collections.abc import Callable

from training.draw import Draw, Example, assistant, user
from training.words import COLORS, FRUITS, THINGS, first_name

ADD = (
    "What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b}", "{a} + {b} =", "{a}+{b}=", "{a}+{b}=?", "{a} + {b} = ?", "{a}+{b}?", "{a}+{b}", "Add {a} and {b}.",
    "Calculate {a} + {b}.", "Compute {a} + {b}.", "How much is {a} + {b}?", "What is the sum of {a} and {b}?",
    "Please add {b} to {a}.", "What do you get when you add {a} and {b}?", "{a} plus {b}?", "Can you compute {a} plus {b}?",
    "Tell me {a} + {b}.", "What's {a} + {b}?", "what is {a}+{b}?",
)  # fmt: skip
SUBTRACT = (
    "What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b}", "{a} - {b} =", "{a}-{b}=", "{a}-{b}=?", "{a} - {b} = ?", "{a}-{b}?", "{a}-{b}", "Subtract {b} from {a}.",
    "Calculate {a} - {b}.", "Compute {a} - {b}.", "How much is {a} - {b}?", "Take {b} away from {a}.",
    "What do you get when you subtract {b} from {a}?", "{a} minus {b}?", "Can you compute {a} minus {b}?",
    "Tell me {a} - {b}.", "What's {a} - {b}?", "what is {a}-{b}?",
)  # fmt: skip
GAIN = (
    "{name} has {a} {items} and gets {b} more. How many {items} does {name} have?",
    "{name} had {a} {items}. Then {name} bought {b} more. How many {items} are there now?",
    "{name} sees {a} {items} in one box and {b} in another. How many {items} are there in total?",
)
LOSE = (
    "{name} has {a} {items} and gives away {b}. How many {items} does {name} have left?",
    "{name} had {a} {items} and lost {b} of them. How many {items} are left?",
    "From {a} {items}, {name} sells {b}. How many {items} remain?",
)
PLURALS = (
    "coins",
    "stamps",
    "books",
    "marbles",
    "shells",
    "cards",
    "pencils",
    "beads",
    "buttons",
    "tickets",
    "stones",
    "eggs",
)


def number(draw: Draw) -> int:
    return draw.randint(0, draw.choice((9, 99, 99, 999, 999, 999, 999, 999, 999, 9999)))


def operands(draw: Draw) -> tuple[str, int, int]:
    """An operation and two numbers on the draw's side of the split; a + b and b + a are one combination."""

    def key(value: tuple[str, int, int]) -> tuple[object, ...]:
        operation, a, b = value
        return ("arithmetic", operation, *(sorted((a, b)) if operation == "+" else (a, b)))

    return draw.split(lambda: (draw.choice("+-"), number(draw), number(draw)), key)


def arithmetic(draw: Draw) -> Example:
    operation, a, b = operands(draw)
    result = a + b if operation == "+" else a - b
    if draw.chance(0.1) and result >= 0:
        items, (name, _) = draw.choice(PLURALS), first_name(draw)
        question = draw.choice(GAIN if operation == "+" else LOSE).format(a=a, b=b, items=items, name=name)
    else:
        question = draw.choice(ADD if operation == "+" else SUBTRACT).format(a=a, b=b)
    return Example("arithmetic", [user(question), assistant(str(result))], key=("arithmetic", operation, a, b))


def drill(draw: Draw) -> Example:
    """A run of sums in one conversation: many problems for few tokens."""
    turns = [arithmetic(draw) for _ in range(draw.randint(4, 24))]
    return Example("arithmetic", [message for turn in turns for message in turn.messages])


def join(items: list[str], draw: Draw | None = None) -> str:
    """The items behind commas; with a draw, sometimes separated or wrapped otherwise, as users write lists."""
    if draw is None or draw.chance(0.7):
        return ", ".join(items)
    way = draw.choice((" ", "[]", "and", ","))
    if way == "[]":
        return "[" + ", ".join(items) + "]"
    return ", ".join(items[:-1]) + " and " + items[-1] if way == "and" else way.join(items)


def sort_numbers(draw: Draw, items: list[int]) -> tuple[str, str]:
    down = draw.chance(0.4)
    order = draw.choice(("in descending order", "from largest to smallest", "descending") if down else
                        ("in ascending order", "from smallest to largest", "ascending", ""))  # fmt: skip
    ask = draw.choice(
        (
            "Sort these numbers {o}: {l}",
            "Sort {l} {o}.",
            "Put these numbers in order {o}: {l}",
            "Sort the list {l} {o}.",
            "Sort {o}: {l}",
            "Order these numbers {o}: {l}",
            "Please sort {l} {o}.",
        )
    )
    text = (
        ask.format(o=order, l=join([str(i) for i in items], draw))
        .replace(" :", ":")
        .replace(" .", ".")
        .replace("in order in", "in")
    )
    return text, join([str(i) for i in sorted(items, reverse=down)])


def sort_words(draw: Draw, items: list[str]) -> tuple[str, str]:
    ask = draw.choice(("Sort these words alphabetically: {l}", "Put these words in alphabetical order: {l}", "Sort alphabetically: {l}.",
                       "Sort the words {l} from A to Z."))  # fmt: skip
    return ask.format(l=join(items, draw)), join(sorted(items))


def count_items(draw: Draw, items: list[str]) -> tuple[str, str]:
    ask = draw.choice(("How many items are in this list: {l}?", "Count the words: {l}", "How many words are there: {l}?",
                       "Count the items in the list {l}."))  # fmt: skip
    return ask.format(l=join(items, draw)), str(len(items))


def count_word(draw: Draw, items: list[str]) -> tuple[str, str]:
    word = draw.choice(items)
    items += [word] * draw.randint(0, 3)
    draw.shuffle(items)
    ask = draw.choice(
        (
            "How many times does {w} appear in: {l}?",
            "Count how often {w} is in this list: {l}",
            "How many {w} are in the list {l}?",
        )
    )
    return ask.format(w=word, l=join(items, draw)), str(items.count(word))


def extreme(draw: Draw, items: list[int]) -> tuple[str, str]:
    largest = draw.chance(0.5)
    word = draw.choice(("largest", "biggest", "highest") if largest else ("smallest", "lowest"))
    ask = draw.choice(
        ("What is the {w} number in {l}?", "Which of these numbers is the {w}: {l}?", "Find the {w} number: {l}")
    )
    return ask.format(w=word, l=join([str(i) for i in items], draw)), str(max(items) if largest else min(items))


def reverse(draw: Draw, items: list[str]) -> tuple[str, str]:
    ask = draw.choice(
        ("Reverse this list: {l}", "Write this list backwards: {l}", "Put the list {l} in reverse order.")
    )
    return ask.format(l=join(items, draw)), join(items[::-1])


def lists(draw: Draw) -> Example:
    """Sorting and counting; sorting numbers and counting are the heavier part."""
    makers: tuple[tuple[str, Callable[[Draw, list], tuple[str, str]], bool], ...] = (  # type: ignore[type-arg]
        ("sorting", sort_numbers, True), ("sorting", sort_numbers, True), ("sorting", sort_words, False),
        ("counting", count_items, False), ("counting", count_word, False), ("counting", count_items, False), ("counting", count_word, False), ("sorting", extreme, True), ("sorting", reverse, False),
    )  # fmt: skip
    task, make, numbers = draw.choice(makers)
    top = draw.choice((9, 99, 99, 999))

    def choose() -> list[int] | list[str]:
        if numbers:
            return [draw.randint(0, top) for _ in range(draw.randint(3, 7))]
        return draw.some(draw.choice((THINGS, FRUITS, COLORS)), 3, 8)

    items = draw.split(choose, lambda value: ("list", *value))
    key = ("list", *items)
    question, answer = make(draw, items)
    return Example(task, [user(question), assistant(answer)], key=key)


def list_drill(draw: Draw) -> Example:
    """A run of questions about lists in one conversation."""
    turns = [lists(draw) for _ in range(draw.randint(3, 12))]
    return Example(turns[-1].task, [message for turn in turns for message in turn.messages])
