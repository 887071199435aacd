"""Word lists, and a maker of words that no list holds."""

from training.draw import Draw

SHE = (
    "Anna Mary Lisa Emma Sofia Clara Nina Julia Laura Maria Eva Ida Ella Nora Alice Sarah Rosa Lena Maya Zoe Grace Hanna "
    "Ingrid Olivia Mia Ava Chloe Lucy Ruth Jane Linda Karen Susan Helen Diana Vera Irene Marta Petra Tara Mina Aisha Fatima "
    "Yuki Mei Priya Leila Amara Carmen Elena Bianca Freya Astrid Sigrid Tove Wendy Paula Monica Gloria Stella"
).split()
HE = (
    "John Peter Paul Tom David Mark Simon Daniel Oscar Leo Max Hugo Felix Adam Noah Liam Erik Lars Ivan Omar Ali Kenji Hiro "
    "Ravi Arjun Chen Wei Carlos Diego Pedro Marco Luca Matteo Jack Henry George Arthur Walter Frank Bruno Victor Emil Anton "
    "Karl Otto Nils Sven Bjorn Tariq Kofi Kwame Samuel Jacob Michael James Robert William Thomas Richard Joseph Bob Alex"
).split()
SURNAMES = (
    "Smith Jones Brown Miller Davis Wilson Taylor Clark Lewis Walker Hall Young King Wright Green Baker Hill Moore Cooper "
    "Ward Turner Parker Berg Lind Holm Strand Dahl Vik Lund Moen Haugen Solberg Weber Fischer Keller Braun Vogel Klein Rossi "
    "Bianchi Costa Silva Santos Garcia Lopez Torres Ortiz Novak Kowalski Tanaka Sato Suzuki Kim Park Lee Wang Chen Patel "
    "Singh Khan Haddad Mensah Okafor Diallo Ivanov Petrov Larsen Jensen Olsen"
).split()
_SINGLE_WORD_CITIES = (
    "Oslo Bergen Paris London Berlin Rome Madrid Lisbon Vienna Prague Warsaw Dublin Zurich Geneva Milan Naples Porto Athens "
    "Helsinki Stockholm Copenhagen Hamburg Munich Lyon Seville Toronto Montreal Boston Chicago Denver Seattle Austin Dallas "
    "Miami Phoenix Lima Quito Bogota Cairo Nairobi Accra Lagos Tunis Delhi Mumbai Tokyo Osaka Kyoto Seoul Beijing Shanghai "
    "Bangkok Hanoi Manila Sydney Perth Auckland Istanbul Riga Tallinn Ghent Antwerp Krakow Budapest Sofia Tromso Malmo"
).split()
CITIES = [
    *_SINGLE_WORD_CITIES,
    "New York",
    "San Francisco",
    "Los Angeles",
    "Buenos Aires",
    "Cape Town",
    "Mexico City",
    "Hong Kong",
]
COUNTRIES = (
    "Norway Sweden Denmark Finland Germany France Spain Italy Portugal Poland Austria Greece Turkey Egypt Kenya Ghana Nigeria "
    "India China Japan Korea Vietnam Thailand Australia Canada Mexico Brazil Peru Chile Argentina Ireland Iceland Morocco"
).split()
JOBS = (
    "teacher doctor nurse engineer baker farmer lawyer painter writer pilot carpenter plumber chef waiter librarian scientist "
    "designer architect accountant journalist musician photographer mechanic electrician gardener tailor driver translator "
    "dentist programmer economist editor fisherman firefighter optician actor"
).split()
HOBBIES = (
    "chess painting hiking cooking swimming cycling reading singing fishing gardening knitting running sailing skiing dancing "
    "photography climbing pottery astronomy birdwatching tennis football baking surfing archery origami"
).split()
COLORS = "red blue green yellow white black brown grey orange purple pink silver golden turquoise".split()
ANIMALS = (
    "fox owl bear hare mouse hedgehog badger otter squirrel deer wolf rabbit crow duck frog turtle goose cat dog goat lamb "
    "beaver mole robin sparrow pony piglet kitten swan heron"
).split()
PETS = "dog cat rabbit parrot hamster horse goat turtle pony goldfish canary ferret lizard".split()
FRUITS = (
    "apple pear plum cherry peach lemon orange banana grape melon fig mango kiwi berry apricot papaya lime coconut date quince"
).split()
OBJECTS = (
    "lamp chair table desk kettle bottle backpack jacket scarf umbrella notebook pencil radio camera clock mirror blanket "
    "basket bicycle helmet guitar violin drum hammer ladder bucket shovel candle mug plate bowl spoon pillow rug sofa shelf "
    "tent rope compass map lantern kite ball doll puzzle whistle ribbon button key ring coin feather shell book hat glove"
).split()
THINGS = sorted(set(FRUITS + OBJECTS + ANIMALS))
MONTHS = ("January February March April May June July August September October November December").split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
ADJECTIVES = (
    "bright quiet silver northern golden clever swift gentle hidden royal little grand modern classic blue".split()
)
NOUNS = "river harbor forest mountain garden bridge lantern castle meadow island valley tower window road star".split()

_ONSETS = "b br c ch d dr f fl g gr h j k kl l m n p pr r s sk st t tr v w z th sh".split()
_VOWELS = "a a e e i i o o u ai ea ia oo y".split()
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "k", "th", "nd", "rt", "x", "ll"]


_ACCENTS = str.maketrans({"a": "å", "e": "é", "i": "í", "o": "ö", "u": "ü", "n": "ñ", "s": "š", "l": "ł"})
_ACCENTS_2 = str.maketrans({"a": "á", "e": "è", "o": "ø", "u": "ú", "c": "ç", "z": "ž", "i": "ï"})
_SCRIPTS = ((0x3B1, 0x3C9), (0x430, 0x44F), (0x3042, 0x3093), (0x4E00, 0x4FFF), (0x5D0, 0x5EA), (0xAC00, 0xADFF))


def made_up(draw: Draw) -> str:
    """A pronounceable lower-case word of one to three syllables that is probably in no list."""
    syllables = draw.choice((1, 2, 2, 2, 3))
    return "".join(draw.choice(_ONSETS) + draw.choice(_VOWELS) + draw.choice(_CODAS) for _ in range(syllables))


def foreign(draw: Draw) -> str:
    """A made-up name with accents or in another script, so that no byte is new to the model."""
    if draw.chance(0.7):
        return made_up(draw).translate(draw.choice((_ACCENTS, _ACCENTS_2))).capitalize()
    low, high = draw.choice(_SCRIPTS)
    return "".join(chr(draw.randint(low, high)) for _ in range(draw.randint(2, 5))).capitalize()


def first_name(draw: Draw) -> tuple[str, str]:
    """A first name with its pronoun, "She" or "He"; one in three is made up."""
    if draw.chance(0.33):
        return (foreign(draw) if draw.chance(0.2) else made_up(draw).capitalize()), draw.choice(("She", "He"))
    pronoun = draw.choice(("She", "He"))
    return draw.choice(SHE if pronoun == "She" else HE), pronoun


def surname(draw: Draw) -> str:
    return made_up(draw).capitalize() if draw.chance(0.25) else draw.choice(SURNAMES)


def person(draw: Draw) -> tuple[str, str]:
    """A first or full name with its pronoun."""
    first, pronoun = first_name(draw)
    return (first if draw.chance(0.6) else f"{first} {surname(draw)}"), pronoun


def city(draw: Draw) -> str:
    if draw.chance(0.3):
        return foreign(draw) if draw.chance(0.15) else made_up(draw).capitalize()
    return draw.choice(CITIES)


def date(draw: Draw) -> str:
    return f"{draw.randint(1, 28)} {draw.choice(MONTHS)}" + (f" {draw.randint(1990, 2039)}" if draw.chance(0.4) else "")


def iso_date(draw: Draw) -> str:
    return f"{draw.randint(2020, 2039)}-{draw.randint(1, 12):02d}-{draw.randint(1, 28):02d}"


def clock_time(draw: Draw) -> str:
    return f"{draw.randint(0, 23):02d}:{draw.choice((0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55)):02d}"


def price(draw: Draw) -> int | float:
    return draw.randint(1, 999) if draw.chance(0.5) else draw.randint(0, 199) + draw.randint(1, 99) / 100


def email(draw: Draw) -> str:
    host = made_up(draw) if draw.chance(0.5) else draw.choice(("mail", "post", "example", "work", "inbox", "home"))
    return f"{draw.choice(SHE + HE).lower() if draw.chance(0.6) else made_up(draw)}{draw.choice(('', '', str(draw.randint(1, 99))))}@{host}.{draw.choice(('com', 'org', 'net', 'no'))}"


def phone(draw: Draw) -> str:
    return f"{draw.randint(100, 999)}-{draw.randint(1000, 9999)}"


def title(draw: Draw) -> str:
    noun = made_up(draw).capitalize() if draw.chance(0.3) else draw.choice(NOUNS).capitalize()
    return f"The {draw.choice(ADJECTIVES).capitalize()} {noun}"


def company(draw: Draw) -> str:
    ends = (
        "Books",
        "Tools",
        "Foods",
        "Travel",
        "Works",
        "Garden",
        "Bank",
        "Telecom",
        "Music",
        "Labs",
        "Market",
        "Shoes",
    )
    return f"{made_up(draw).capitalize() if draw.chance(0.6) else surname(draw)} {draw.choice(ends)}"
