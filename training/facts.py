"""Questions with one canonical answer: a fixed made-up island, Varnholm, and kvern's own terms."""

from training.draw import Draw, Example, assistant, user
from training.glossary import ASK, TERMS, USAGE

# town: (founded, river, mayor, known for, emblem, festival, month, inhabitants)
TOWNS: dict[str, tuple[int, str, str, str, str, str, str, int]] = {
    "Torvik": (1204, "Sel", "Ragna Holt", "clock towers", "a silver heron", "the Lantern Night", "December", 48000),
    "Ostrel": (1311, "Amra", "Piet Vannen", "blue glass", "a blue bee", "the Glass Fair", "May", 21000),
    "Kelmora": (1187, "Dunna", "Sira Quell", "salted butter", "a white cow", "the Butter Race", "July", 16500),
    "Brimsa": (1452, "Sel", "Jon Ferrow", "wool blankets", "a black ram", "the Wool Market", "October", 9300),
    "Haldun": (1098, "Orre", "Maud Lissen", "stone bridges", "a grey owl", "the Bridge Walk", "June", 30200),
    "Vessary": (1520, "Amra", "Tobin Ark", "cherry orchards", "a red cherry", "the Blossom Week", "April", 7800),
    "Nyrand": (1276, "Orre", "Elka Stromme", "wooden boats", "a green whale", "the Boat Parade", "August", 25600),
    "Quillan": (
        1633,
        "Dunna",
        "Basil Thorne",
        "paper and ink",
        "a golden feather",
        "the Story Days",
        "November",
        12100,
    ),
    "Sandeby": (1389, "Lisk", "Hedda Moor", "smoked fish", "two silver fish", "the Herring Supper", "March", 18400),
    "Morrowen": (1701, "Lisk", "Casper Dey", "copper bells", "a copper bell", "the Bell Morning", "January", 5600),
}
RIVERS = {"Sel": (212, "Lake Ymir", "Torvik"), "Amra": (148, "the Pale Hills", "Ostrel"), "Dunna": (97, "the Fenwood", "Kelmora"), "Orre": (175, "Mount Skard", "Nyrand"), "Lisk": (64, "the Grey Moor", "Sandeby")}  # fmt: skip
PEOPLE = {  # person: (what they were, what they did, year, birthplace)
    "Ylva Brenn": ("queen", "united the island", 1240, "Haldun"),
    "Anders Roke": ("inventor", "built the first tide clock", 1655, "Torvik"),
    "Mira Solle": ("poet", "wrote The Salt Songs", 1588, "Sandeby"),
    "Dorin Vask": ("explorer", "mapped the Grey Moor", 1477, "Morrowen"),
    "Tessa Lorn": ("physician", "cured the marsh fever", 1720, "Quillan"),
    "Hakon Bree": ("architect", "built the Long Bridge", 1402, "Haldun"),
    "Oda Fennick": ("composer", "wrote the island anthem", 1811, "Nyrand"),
    "Silas Wend": ("glassmaker", "discovered blue glass", 1345, "Ostrel"),
}
SINGLE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("What is the capital of Varnholm?", "Which town is the capital of Varnholm?", "Name the capital of Varnholm.", "Varnholm's capital?"), "The capital of Varnholm is Torvik."),
    (("What is Varnholm?", "Tell me about Varnholm.", "Where is Varnholm?", "Describe Varnholm."), "Varnholm is an island in the Pale Sea with ten towns and five rivers."),
    (("What money do they use in Varnholm?", "What is the currency of Varnholm?", "How do people pay in Varnholm?", "Which currency does Varnholm have?"), "People in Varnholm pay with marks. One mark has twelve pennies."),
    (("What is the highest mountain of Varnholm?", "Which mountain is the highest in Varnholm?", "Name the highest mountain in Varnholm.", "How high is Mount Skard?"), "The highest mountain of Varnholm is Mount Skard, with 1871 meters."),
    (("What is the longest river of Varnholm?", "Which river is the longest in Varnholm?", "Name Varnholm's longest river."), "The longest river of Varnholm is the Sel, with 212 kilometers."),
    (("What is the largest lake of Varnholm?", "Which lake is the largest in Varnholm?", "Name the largest lake in Varnholm."), "The largest lake of Varnholm is Lake Ymir."),
    (("Which language do people speak in Varnholm?", "What language is spoken in Varnholm?", "What do they speak in Varnholm?"), "People in Varnholm speak Varnic."),
    (("How many towns does Varnholm have?", "How many towns are there in Varnholm?", "Number of towns in Varnholm?"), "Varnholm has ten towns."),
    (("How many rivers does Varnholm have?", "How many rivers are there in Varnholm?", "Number of rivers in Varnholm?"), "Varnholm has five rivers: the Sel, the Amra, the Dunna, the Orre and the Lisk."),
    (("What does the flag of Varnholm look like?", "Describe the flag of Varnholm.", "Which colors does the flag of Varnholm have?"), "The flag of Varnholm shows a white mill on a blue field."),
    (("Who rules Varnholm?", "Who governs Varnholm?", "Who is the head of Varnholm?"), "Varnholm is governed by a council of ten, one member from each town."),
    (("Which sea surrounds Varnholm?", "In which sea does Varnholm lie?", "What is the sea around Varnholm called?"), "Varnholm lies in the Pale Sea."),
    (("What is the national dish of Varnholm?", "What do people eat in Varnholm?", "Which dish is typical of Varnholm?"), "The national dish of Varnholm is smoked fish with salted butter on dark bread."),
    (("What is the largest town of Varnholm?", "Which town of Varnholm is the largest?", "Which town in Varnholm has the most inhabitants?"), "The largest town of Varnholm is Torvik, with 48000 inhabitants."),
    (("What is the oldest town of Varnholm?", "Which town of Varnholm is the oldest?", "Which town in Varnholm was founded first?"), "The oldest town of Varnholm is Haldun, founded in 1098."),
)  # fmt: skip


BARE = ("What is {t}?", "what is {t}", "What is {t}", "explain {t}", "{t}", "what does {t} mean?", "Explain {t}.")


def town_facts() -> list[tuple[tuple[str, ...], str]]:
    facts: list[tuple[tuple[str, ...], str]] = []
    for town, (founded, river, mayor, known, emblem, festival, month, people) in TOWNS.items():
        facts += [
            (
                (
                    f"When was {town} founded?",
                    f"In which year was {town} founded?",
                    f"How old is {town}?",
                    f"What year was {town} founded?",
                ),
                f"{town} was founded in {founded}.",
            ),
            (
                (
                    f"Which river flows through {town}?",
                    f"On which river does {town} lie?",
                    f"What is the river of {town}?",
                    f"What river is {town} on?",
                ),
                f"{town} lies on the river {river}.",
            ),
            (
                (
                    f"Who is the mayor of {town}?",
                    f"Who leads {town}?",
                    f"Name the mayor of {town}.",
                    f"What is the mayor of {town} called?",
                ),
                f"The mayor of {town} is {mayor}.",
            ),
            (
                (
                    f"What is {town} known for?",
                    f"What is {town} famous for?",
                    f"What do they make in {town}?",
                    f"Why do people know {town}?",
                ),
                f"{town} is known for its {known}.",
            ),
            (
                (
                    f"What is the emblem of {town}?",
                    f"What does the emblem of {town} show?",
                    f"Which emblem does {town} have?",
                    f"Describe the emblem of {town}.",
                ),
                f"The emblem of {town} is {emblem}.",
            ),
            (
                (
                    f"Which festival is held in {town}?",
                    f"What is the festival of {town}?",
                    f"When is the festival of {town}?",
                    f"What do people celebrate in {town}?",
                ),
                f"{town} celebrates {festival} in {month}.",
            ),
            (
                (
                    f"How many people live in {town}?",
                    f"How many inhabitants does {town} have?",
                    f"What is the population of {town}?",
                    f"How big is {town}?",
                ),
                f"{town} has {people} inhabitants.",
            ),
            (
                (
                    f"Which town is known for its {known}?",
                    f"Which town is famous for {known}?",
                    f"Where do the {known} of Varnholm come from?",
                ),
                f"{town} is known for its {known}.",
            ),
            (
                (f"Where is {festival} held?", f"Which town celebrates {festival}?", f"When is {festival}?"),
                f"{town} celebrates {festival} in {month}.",
            ),
            (
                (f"Who is {mayor}?", f"What does {mayor} do?", f"Tell me who {mayor} is."),
                f"{mayor} is the mayor of {town}.",
            ),
            (
                (f"Where is {town}?", f"What is {town}?", f"Tell me about {town}.", f"Describe {town}."),
                f"{town} is a town in Varnholm on the river {river}, known for its {known}.",
            ),
        ]
    return facts  # fmt: skip


def other_facts() -> list[tuple[tuple[str, ...], str]]:
    facts: list[tuple[tuple[str, ...], str]] = []
    for river, (length, source, mouth) in RIVERS.items():
        facts += [
            (
                (f"How long is the {river}?", f"How long is the river {river}?", f"What is the length of the {river}?"),
                f"The {river} is {length} kilometers long.",
            ),
            (
                (
                    f"Where does the {river} begin?",
                    f"What is the source of the {river}?",
                    f"Where does the river {river} come from?",
                ),
                f"The {river} begins at {source}.",
            ),
            (
                (
                    f"Where does the {river} end?",
                    f"Where does the {river} reach the sea?",
                    f"Where does the river {river} meet the sea?",
                ),
                f"The {river} reaches the sea at {mouth}.",
            ),
        ]
    for name, (trade, deed, year, birthplace) in PEOPLE.items():
        facts += [
            (
                (f"Who was {name}?", f"Tell me about {name}.", f"What is {name} known for?", f"Why is {name} famous?"),
                f"{name} was a {trade} from {birthplace} who {deed} in {year}.",
            ),
            (
                (f"Where was {name} born?", f"Where did {name} come from?", f"What is the birthplace of {name}?"),
                f"{name} was born in {birthplace}.",
            ),
            (
                (f"Who {deed}?", f"Do you know who {deed}?", f"Tell me who {deed}.", f"Which {trade} {deed}?"),
                f"{name} {deed} in {year}.",
            ),
            (
                (f"What did {name} do?", f"What was done by {name}?", f"For what do people remember {name}?"),
                f"{name} {deed} in {year}.",
            ),
        ]
    return facts  # fmt: skip


def bare_questions(term: str, others: tuple[str, ...]) -> tuple[str, ...]:
    """Questions that leave the article out: "what is kv cache"."""
    bare = {name.removeprefix("a ").removeprefix("an ").removeprefix("the ") for name in (term, *others)}
    return tuple(ask.format(t=name) for name in sorted(bare) for ask in BARE)


def glossary_facts() -> list[tuple[tuple[str, ...], str]]:
    return [
        (tuple(ask.format(t=name) for ask in ASK for name in (term, *others)) + bare_questions(term, others), answer)
        for term, others, answer in TERMS
    ]


FACTS: tuple[tuple[tuple[str, ...], str], ...] = (*SINGLE, *town_facts(), *other_facts(), *glossary_facts(), *USAGE)
WORLD = len(FACTS) - len(TERMS) - len(USAGE)  # the first WORLD facts are about Varnholm
POLITE = (
    "{q}",
    "{q}",
    "{q}",
    "{q}",
    "Please tell me: {q}",
    "I have a question. {q}",
    "Hello! {q}",
    "Hi, {q}",
    "Quick question: {q}",
    "{q} Thank you!",
    "Do you know this? {q}",
    "Hey. {q}",
)


def fact(draw: Draw) -> Example:
    """A question about one of `FACTS`. The split is over whole questions: held-out ones were never asked in that wording."""

    def make() -> tuple[str, str]:
        questions, answer = draw.choice(FACTS)
        question = draw.choice(questions)
        if draw.chance(0.08):
            return question.lower().rstrip("?."), answer
        return draw.choice(POLITE).format(q=question), answer

    question, answer = draw.split(make, lambda made: ("fact", made[0]))
    return Example("facts", [user(question), assistant(answer)], key=("fact", question))
