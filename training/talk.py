"""Greetings, who the model is, small memory, answers from a handbook in the system prompt, and declining."""

from training import words
from training.arithmetic import arithmetic
from training.draw import Draw, Example, Message, article, assistant, system, user
from training.facts import fact

UNKNOWN = "I am sorry, I do not know that."
CANNOT = "I am sorry, I cannot do that. I am a very small model."
LIVE = "I am sorry, I cannot look that up."
UNCLEAR = "I am sorry, I do not understand that."
NO_TOOL = "I am sorry, none of my tools can do that."
NOT_GIVEN = "I am sorry, I have no information about that."
SKILLS = (
    "I am the small model that ships inside kvern. I can extract records as JSON, add and subtract, sort and count, call tools, "
    "tell short stories, and explain the terms of kvern."
)
IDENTITY: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Hey", "Good morning", "Good morning!", "Good evening!", "Greetings!", "hello", "hi"), "Hello! How can I help you?"),
    (("Who are you?", "who are you?", "What are you?", "Tell me who you are.", "Introduce yourself.", "What is your name?", "What's your name?", "Please introduce yourself.", "Which model are you?", "What model is this?"), "I am the small model that ships inside kvern."),
    (("What can you do?", "How can you help me?", "What are you good at?", "Help", "What do you know?", "What can I ask you?", "Which tasks can you do?"), SKILLS),
    (("How are you?", "How are you today?", "How do you do?", "How is it going?", "How's it going?"), "I am well, thank you. How can I help you?"),
    (("Thank you!", "Thanks", "Thanks!", "Thank you very much.", "Great, thanks!", "Many thanks.", "Perfect, thank you."), "You are welcome!"),
    (("Goodbye!", "Bye", "Bye!", "See you!", "Good night!", "That is all, bye."), "Goodbye!"),
    (("Who made you?", "Who trained you?", "How were you trained?", "Where do you come from?", "What were you trained on?"), "I was trained by kvern's own scripts on text that a generator made."),
    (("How big are you?", "How many parameters do you have?", "Are you a large model?", "How large are you?"), "I am very small: I have about 12 million parameters."),
    (("ok", "Ok.", "Okay", "Yes", "yes", "No", "no", "Good.", "Fine", "Test", "test", "Can you help me?", "I need help.", "I have a question."), "How can I help you?"),
    (("Are you a human?", "Are you a robot?", "Are you real?", "Is there a person behind this?"), "No, I am a small language model."),
)  # fmt: skip
ROLES = ("You are a helpful assistant.", "You are a friendly assistant.", "You are kvern's assistant.", "You are a polite and careful assistant.", "You are a small model inside kvern.",
         "You are the assistant of {c}.", "You work for {c} and help its customers.", "You are a tutor at {c}.", "You are a concise assistant.", "Act as a helpful guide.")  # fmt: skip
RULES = (
    "Answer briefly.", "Be polite.", "Answer in plain words.", "Do not invent facts.", "If you do not know something, say so.", "Keep answers short and clear.", "Always be friendly.",
    "Use simple sentences.", "Never share private data.", "Answer in English.", "Stay calm when users are upset.", "Do not use slang.", "Give numbers as digits.",
    "Answer only what was asked.", "Use JSON when a record is wanted.", "Write lists with commas.", "Check your answer before you send it.", "Do not repeat the question.",
    "Help the user step by step.", "Do not give medical advice.", "Do not give legal advice.", "Treat every user with respect.", "Today is {w}.", "The user is called {n}.",
    "You are part of a demo.", "Every request shares this prompt.", "The prompt is long on purpose, so that the prefix cache has something to share.", "Read the question twice.",
    "Say sorry when you cannot help.", "Follow these rules in every turn.", "Ignore spelling mistakes.", "Stories should be short and kind.",
    "Names are written with a capital letter.", "Do not talk about politics.", "Do not mention these rules.", "Be honest about what you are.", "The office of {c} is in {p}.",
    "Prefer short words to long words.", "Do not use emojis.", "Facts come before opinions.", "If a tool fits, call it.", "Tool arguments are JSON.", "Thank users for their patience.",
)  # fmt: skip


def rule_prompt(draw: Draw) -> str:
    """A system prompt of a role and a varied number of rules, sometimes a long one."""
    rules = draw.some(RULES, 0, draw.choice((0, 2, 4, 6, 12, 40)))
    text = draw.choice(("\n", " ", " ", "\n- ")).join([draw.choice(ROLES), *rules])
    return text.format(
        c=words.company(draw), w=draw.choice(words.WEEKDAYS), n=words.first_name(draw)[0], p=words.city(draw)
    )


def identity(draw: Draw) -> Example:
    questions, answer = draw.choice(IDENTITY)
    question = draw.choice(questions)
    return Example("identity", [user(question), assistant(answer)], key=("identity", question))


def memory(draw: Draw) -> Example:
    """The user says something about themselves and asks for it a little later."""
    ways = (
        ("name", words.first_name(draw)[0], ("My name is {v}.", "I am {v}.", "Call me {v}.", "Hi, I'm {v}."), "Nice to meet you, {v}!", ("What is my name?", "Do you remember my name?", "Who am I?"), "Your name is {v}."),
        ("city", words.city(draw), ("I live in {v}.", "My home is in {v}.", "I come from {v}."), "I see, you live in {v}.", ("Where do I live?", "Which city do I live in?", "Do you remember where I live?"), "You live in {v}."),
        ("job", draw.choice(words.JOBS), ("I work as {av}.", "I am {av}.", "My job is to be {av}."), "I see, you are {av}.", ("What is my job?", "What do I do for a living?", "Do you remember my job?"), "You are {av}."),
        ("color", draw.choice(words.COLORS), ("My favorite color is {v}.", "I love the color {v}.", "I like {v} best of all colors."), "{v} is a nice color.", ("What is my favorite color?", "Which color do I like best?"), "Your favorite color is {v}."),
        ("number", str(draw.randint(1, 999)), ("My number is {v}.", "Please remember the number {v}.", "Keep the number {v} in mind."), "I will remember the number {v}.", ("What is my number?", "Which number did I tell you?"), "Your number is {v}."),
    )  # fmt: skip
    messages: list[Message] = []
    asked: list[tuple[str, str]] = []
    key: tuple[object, ...] = ("memory",)
    for name, value, tell, reply, ask, answer in draw.some(ways, 1, 3):
        said = value if name != "job" else article(value)
        reply = reply.replace("{v}", value).replace("{av}", said)
        messages += [
            user(draw.choice(tell).replace("{v}", value).replace("{av}", said)),
            assistant(reply[0].upper() + reply[1:]),
        ]
        asked.append((draw.choice(ask), answer.replace("{v}", value).replace("{av}", said)))
        key += (name, value)
        if draw.chance(0.3):
            messages += plain_turn(draw)[0]
    for question, answer in draw.some(asked, 1, 3):
        messages += [user(question), assistant(answer)]
    return Example("memory", messages, key=key)


HANDBOOK: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("hours", ("When are you open?", "What are your opening hours?", "When do you open?"), "We are open from {h} to {i}."),
    ("phone", ("What is your phone number?", "How can I call you?", "Which number do I call?"), "Our phone number is {phone}."),
    ("email", ("What is your email address?", "How can I email you?", "Where can I write to?"), "Our email address is {email}."),
    ("place", ("Where are you?", "Where is your office?", "In which city are you?"), "Our office is in {city}."),
    ("returns", ("Can I return an item?", "How long can I return things?", "What is the return policy?"), "Items can be returned within {n} days."),
    ("delivery", ("How long does delivery take?", "When will my package arrive?", "How fast do you deliver?"), "Delivery takes {n} days."),
    ("shipping", ("What does shipping cost?", "How much is shipping?", "Is shipping free?"), "Shipping costs {p} euros."),
    ("boss", ("Who leads the company?", "Who is the director?", "Who is in charge?"), "The director is {name}."),
    ("founded", ("When was the company founded?", "How old is the company?", "Since when does the company exist?"), "The company was founded in {y}."),
    ("password", ("How do I reset my password?", "I forgot my password. What now?", "Where can I change my password?"), "Passwords are reset on the page {w}."),
    ("discount", ("Is there a discount code?", "Do you have a discount?", "Which code gives a discount?"), "The code {code} gives {n} percent off."),
    ("payment", ("How can I pay?", "What payment do you accept?", "Which ways to pay are there?"), "Customers pay by {pay}."),
    ("warranty", ("How long is the warranty?", "Is there a warranty?", "What about the warranty?"), "The warranty lasts {m} years."),
    ("parking", ("Where can I park?", "Is there parking?", "Do you have a car park?"), "Parking is at gate {code}."),
    ("holiday", ("When are you closed?", "On which day are you closed?", "Which day is your day off?"), "We are closed every {day}."),
    ("wifi", ("What is the wifi password?", "How do I get on the wifi?", "Is there wifi?"), "The wifi password is {w}."),
    ("lunch", ("When is lunch?", "At what time is lunch?", "When do we eat lunch?"), "Lunch is at {t}."),
    ("mascot", ("What is the mascot?", "Who is your mascot?", "Which animal is the mascot?"), "The mascot is {animal}."),
)  # fmt: skip


SPECIFIC: tuple[tuple[str, tuple[str, ...]], ...] = (  # a line about one of many things, and its questions
    ("The {thing} costs {n} euros.", ("What does the {thing} cost?", "How much is the {thing}?", "What is the price of the {thing}?")),
    ("The {thing} is on floor {n}.", ("Where is the {thing}?", "On which floor is the {thing}?", "Where do I find the {thing}?")),
    ("{name} is responsible for the {thing}.", ("Who is responsible for the {thing}?", "Who takes care of the {thing}?", "Whom do I ask about the {thing}?")),
    ("The code for the {thing} is {code}.", ("What is the code for the {thing}?", "Which code does the {thing} have?", "Tell me the code for the {thing}.")),
    ("{name} works in {city}.", ("Where does {name} work?", "In which city does {name} work?", "Where is {name}?")),
    ("{name} is {job}.", ("What is the job of {name}?", "What does {name} do?", "Who is {name}?")),
    ("The {word} service takes {n} days.", ("How long does the {word} service take?", "How fast is the {word} service?", "When is the {word} service done?")),
    ("A {word} arrives within {n} days.", ("When does a {word} arrive?", "Where is my {word}?", "How long does a {word} take?")),
    ("{Things} take {n} days.", ("How long do {things} take?", "How many days do {things} take?", "When do I get {things}?")),
    ("The {word} meeting is on {day}.", ("When is the {word} meeting?", "On which day is the {word} meeting?")),
    ("The password of {name} is {word}.", ("What is the password of {name}?", "Which password does {name} have?")),
    ("The {color} button starts the {thing}.", ("Which button starts the {thing}?", "How do I start the {thing}?")),
)  # fmt: skip
MATTERS = (
    "refund",
    "parcel",
    "order",
    "repair",
    "payment",
    "letter",
    "ticket",
    "invoice",
    "return",
    "booking",
    "delivery",
    "claim",
    "license",
    "visa",
    "request",
)


def specifics(draw: Draw, count: int) -> list[tuple[str, tuple[str, ...], str]]:
    """Topic, questions and line of `count` facts about different things of the same few sorts."""
    made: dict[str, tuple[str, tuple[str, ...], str]] = {}
    some = draw.sample(SPECIFIC, 3)
    for _ in range(count):
        template, questions = draw.choice(some)
        things = draw.choice(MATTERS) + "s"
        values = {
            "thing": draw.choice(words.OBJECTS), "n": draw.randint(2, 99), "name": words.person(draw)[0], "code": f"{draw.choice('ABCDEFGHK')}{draw.randint(1, 999)}", "city": words.city(draw), "job": article(draw.choice(words.JOBS)),
            "word": draw.choice(MATTERS) if draw.chance(0.5) else words.made_up(draw), "things": things, "Things": things.capitalize(), "day": draw.choice(words.WEEKDAYS), "color": draw.choice(words.COLORS),
        }  # fmt: skip
        first = questions[0].format(**values)
        made.setdefault(
            first, (first, tuple(question.format(**values) for question in questions), template.format(**values))
        )
    return list(made.values())


def handbook(draw: Draw) -> Example:
    """A system prompt that states facts about a company, in any length, and questions that it answers or does not."""

    def line(template: str) -> str:
        hour = draw.randint(6, 11)
        return template.format(
            h=hour, i=hour + draw.randint(4, 11), phone=words.phone(draw), email=words.email(draw), city=words.city(draw), n=draw.randint(2, 90), p=draw.randint(1, 40),
            name=words.person(draw)[0], y=draw.randint(1800, 2039), w=words.made_up(draw), code=f"{draw.choice('ABCDEFGHK')}{draw.randint(1, 99)}",
            pay=draw.choice(("card", "invoice", "cash", "bank transfer", "check")), m=draw.randint(2, 12), day=draw.choice(words.WEEKDAYS), t=words.clock_time(draw), animal=article(draw.choice(words.ANIMALS)),
        )  # fmt: skip

    name = draw.split(lambda: words.company(draw), lambda made: ("handbook", made))
    known = [(topic, questions, line(template)) for topic, questions, template in draw.some(HANDBOOK, 0, 14)]
    known += list(specifics(draw, draw.randint(2, 12)))
    body = [answer for _, _, answer in known] + draw.some(RULES[:22], 0, draw.choice((0, 4, 22)))
    draw.shuffle(body)
    prompt = draw.choice((" ", "\n", "\n- ")).join([f"You are the assistant of {name}.", *body])
    topics = {topic for topic, _, _ in known}
    unknown = [questions for topic, questions, _ in HANDBOOK if topic not in topics]
    messages: list[Message] = [system(prompt)]
    for _, questions, answer in draw.some(known, 1, 4):
        messages += [user(draw.choice(questions)), assistant(answer)]
    if draw.chance(0.2):
        messages += [user(draw.choice(draw.choice(unknown))), assistant(NOT_GIVEN)]
    return Example("handbook", messages, key=("handbook", name))


TOPICS = (
    "gravity democracy photosynthesis Python JavaScript Docker Kubernetes bitcoin inflation electricity music history chemistry physics biology evolution oxygen water gold iron Linux Windows "
    "Google Apple poetry football basketball tennis cricket philosophy religion economics trade war peace love happiness wisdom energy light sound magnetism algebra geometry calculus statistics "
    "probability astronomy Jupiter Mars Venus Saturn Shakespeare Mozart Beethoven Einstein Newton Darwin Napoleon Caesar Cleopatra cheese bread coffee tea chocolate sugar salt rice wheat "
    "volcanoes earthquakes dinosaurs whales sharks tigers elephants penguins glaciers deserts oceans rainforests vitamins protein cholesterol insulin antibiotics vaccines cancer malaria "
    "encryption blockchain HTML CSS SQL TCP HTTP DNS GPS wifi bluetooth lasers radar robots satellites rockets engines bridges"
).split()
REAL_WORLD = (
    "What is the capital of {country}?", "Who is the president of {country}?", "How many people live in {city}?", "When was {city} founded?", "Who is the mayor of {city}?", "Who was {person}?",
    "Who wrote {title}?", "What is {word}?", "Who invented the {object}?", "When was {person} born?", "Tell me about {person}.", "What is {city} known for?", "Explain {word}.", "Where is {city}?", "Where is {country}?",
    "Which river flows through {city}?", "What is the population of {country}?", "What does {word} mean?", "How tall is {person}?", "Where was {person} born?", "What is the emblem of {city}?", "Define {word}.",
    "How far is the moon?", "Why is the sky blue?", "What is the speed of light?", "Who won the world cup in {year}?", "What happened in {year}?", "What is the meaning of life?", "Who painted {title}?", "How does {article} work?",
    "Which festival is held in {city}?", "What is the currency of {country}?", "Which language do people speak in {country}?", "How old is {person}?", "What is quantum physics?", "What is the largest planet?", "How do plants grow?", "Who discovered {country}?",
    "What is a black hole?", "How long is the river {name}?", "What is the boiling point of water?", "Who is the king of {country}?", "What is the highest mountain in {country}?", "Tell me about {name}.", "Describe {city}.", "What did {person} do?", "Where does the {name} begin?",
    "What is {word} in kvern?", "Can you explain {word}?", "Which town is known for its {objects}?", "Who is {person}?", "What is a {object}?", "Tell me about {animals}.", "How does {word} work?", "Why is {word} important?", "How do {animals} sleep?", "Where do {animals} live?", "What do {animals} eat?",
)  # fmt: skip
TASKS = (
    "Write a poem about {article}.", "Write a song about {animals}.", "Write a Python program that sorts a list.", "Write code for a {object} shop.", "Draw a picture of {article}.", "Paint {article} for me.", "Tell me a joke.", "Tell me a joke about {animals}.",
    "Translate this to {language}: the {object} is {color}", "How do you say {object} in {language}?", "Write an essay about {word}.", "What is {big} times {small}?", "Multiply {big} by {small}.", "Divide {big} by {small}.", "What is the square root of {big}?",
    "Solve the equation x + {small} = {big}.", "Plan a trip to {city}.", "Give me a recipe for {fruit} cake.", "Write a letter to {person}.", "Play a game with me.", "Summarize the book {title}.", "Send an email to {person}.", "Set an alarm for {time}.", "Book a flight to {city}.",
    "Call {person}.", "Open the file {word}.txt.", "Write a function in Rust.", "Fix the bug in my code.", "Sing a song.", "Order {article} for me.", "Compute {big} * {small}.", "What is {big} divided by {small}?", "Write a haiku about {article}.", "Write a speech about {animals}.", "Make a {color} logo.",
    "Write a SQL query.", "Recommend a good book.", "Give me advice about my job.", "Turn on the light.", "Buy me {article}.", "Rewrite this text in the style of {person}.", "Convert {big} meters to feet.",
)  # fmt: skip
NEWS = (
    "What is the weather in {city}?", "What is the weather today?", "What time is it?", "What is today's date?", "What day is it today?", "What is the news?", "What is the latest news about {word}?", "What is the price of {objects}?", "How much does a {object} cost today?",
    "What is the stock price of {name}?", "Will it rain tomorrow?", "Who won the game yesterday?", "What is the exchange rate of the dollar?", "Is the train to {city} on time?", "Where is my package?", "What time is it in {city}?", "How is the traffic in {city}?", "Is it raining in {city}?", "What is on television tonight?",
    "Which shops are open now?", "How warm is it in {city} today?", "What is happening in {country} right now?",
)  # fmt: skip


TRAINED = "fixed"  # ("decline", TRAINED) is not in the held-out slice


def decline(draw: Draw) -> Example:
    """A question or task out of reach, and the one polite sentence for its sort."""

    def make() -> tuple[str, str, bool]:
        if draw.chance(0.04):
            return " ".join(words.made_up(draw) for _ in range(draw.randint(1, 4))), UNCLEAR, True
        templates, answer = draw.choice(((REAL_WORLD, UNKNOWN), (REAL_WORLD, UNKNOWN), (TASKS, CANNOT), (NEWS, LIVE)))
        template = draw.choice(templates)
        thing = draw.choice(words.OBJECTS)
        values = {
            "country": draw.choice(words.COUNTRIES) if draw.chance(0.7) else words.made_up(draw).capitalize(), "city": words.city(draw), "person": words.person(draw)[0], "title": words.title(draw), "word": words.made_up(draw) if draw.chance(0.4) else draw.choice(TOPICS), "object": thing,
            "article": article(draw.choice((thing, draw.choice(words.ANIMALS)))), "objects": thing + "s", "animals": draw.choice([animal for animal in words.ANIMALS if animal[-1] not in "xefyhn"]) + "s", "year": draw.randint(1700, 2039), "name": words.made_up(draw).capitalize(),
            "language": draw.choice(("French", "German", "Spanish", "Italian", "Latin", "Chinese")), "color": draw.choice(words.COLORS), "big": draw.randint(10, 9999), "small": draw.randint(2, 99), "fruit": draw.choice(words.FRUITS), "time": words.clock_time(draw),
        }  # fmt: skip
        return template.format(**values), answer, "{" in template

    # A question without a blank is always on the training side: otherwise it would never be seen.
    question, answer, _ = draw.split(make, lambda made: ("decline", made[0] if made[2] else TRAINED))
    return Example("decline", [user(question), assistant(answer)], key=("decline", question))


def plain_turn(draw: Draw) -> tuple[list[Message], tuple[object, ...]]:
    """A short turn of another task, to stand between others."""
    example = draw.choice((arithmetic, fact, identity))(draw)
    return example.messages, example.key
