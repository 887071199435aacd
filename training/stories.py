"""Short stories in simple English, with questions and answers about them.

A story is a plot of slots; each slot has several wordings. What the story is about (hero, place, thing, helper, ...) is
drawn first, so that every sentence and every answer agrees with it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from training import words
from training.draw import Draw, Example, Message, article, assistant, user

PLACES = ("the forest", "the village", "the old mill", "the harbor", "the meadow", "the big garden", "the mountains", "the castle", "the river bank", "the market", "the lighthouse", "the farm",
          "the orchard", "the small town", "the beach", "the valley")  # fmt: skip
TREASURES = ("red kite", "silver key", "blue scarf", "wooden flute", "golden coin", "little drum", "green hat", "old map", "music box", "glass bead", "paper boat", "warm blanket", "brass bell",
             "striped ball", "story book", "tin whistle", "glass feather", "lantern", "painted cup", "yellow boot")  # fmt: skip
TRAITS = (
    "brave",
    "curious",
    "shy",
    "clever",
    "kind",
    "small",
    "cheerful",
    "patient",
    "quiet",
    "stubborn",
    "gentle",
    "careful",
)
WEATHER = ("sunny", "windy", "cold", "rainy", "foggy", "warm", "snowy", "quiet")
SKILLS = (
    "swim",
    "sing",
    "whistle",
    "climb",
    "read",
    "bake bread",
    "paint",
    "dance",
    "play the drum",
    "sail a boat",
    "tell stories",
    "fix a clock",
)
HIDING = (
    "under a bush",
    "behind a stone wall",
    "in a hollow tree",
    "next to the well",
    "on top of a hay bale",
    "under the bridge",
    "inside a basket",
    "between two rocks",
    "on a high branch",
    "in the tall grass",
)
TRUST = ("friends share what they have", "asking for help is no shame", "small steps lead far", "kindness comes back", "it is never too late to say sorry", "practice makes hard things easy",
         "two can do what one cannot", "the truth is lighter than a lie")  # fmt: skip


@dataclass(frozen=True)
class Cast:
    """Who and what one story is about."""

    hero: str
    hero_kind: str
    pronoun: str  # "she" or "he"
    helper: str
    helper_kind: str
    place: str
    treasure: str
    trait: str
    weather: str
    skill: str
    hiding: str
    moral: str

    def fill(self, text: str) -> str:
        pronoun = self.pronoun
        values = vars(self) | {
            "Pronoun": pronoun.capitalize(), "their": "her" if pronoun == "she" else "his", "them": "her" if pronoun == "she" else "him", "kind": self.hero_kind,
            "a_kind": article(self.hero_kind), "a_trait": article(self.trait), "a_helper": article(self.helper_kind), "a_treasure": article(self.treasure), "a_weather": article(self.weather),
        }  # fmt: skip
        return text.format(**values)


@dataclass(frozen=True)
class Plot:
    """Slots in order, a one-sentence summary, a title and questions with their answers."""

    slots: tuple[tuple[str, ...], ...]
    summary: str
    title: str
    questions: tuple[tuple[tuple[str, ...], str], ...]


OPENING = (
    "Once upon a time, {a_trait} {kind} named {hero} lived near {place}.", "There was once {a_trait} {kind} called {hero}, who lived near {place}.", "Near {place} lived {a_trait} {kind} named {hero}.",
    "In a little house near {place} lived {hero}, {a_trait} {kind}.", "Long ago, {a_trait} {kind} by the name of {hero} had a home near {place}.",
)  # fmt: skip
MORNING = (
    "One {weather} morning, {hero} woke up early.",
    "It was {a_weather} day.",
    "One {weather} day, something happened.",
    "On {a_weather} morning, {hero} went out.",
    "The day began {weather} and still.",
)
MEETING = (
    "On the way {pronoun} met {helper} the {helper_kind}.",
    "Then {helper} the {helper_kind} came by.",
    "Just then, {helper}, {a_helper}, walked past.",
    "{Pronoun} soon met {a_helper} named {helper}.",
)
ENDING = (
    "From that day on, {hero} and {helper} were the best of friends.", "{hero} never forgot that day.", "That night, {hero} slept well and dreamed of {place}.", "And {hero} knew that {moral}.", "{hero} had learned that {moral}.",
    "They laughed all the way home.", "So {hero} learned that {moral}.",
)  # fmt: skip
BASE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Who is the story about?", "Who is the main character?", "Who is the hero of the story?", "What is the name of the hero?"), "The story is about {hero}, {a_trait} {kind}."),
    (("Where does {hero} live?", "Where did {hero} live?", "Where does the story take place?", "Near which place does {hero} live?"), "{hero} lives near {place}."),
    (("What kind of animal is {hero}?", "What is {hero}?", "Which animal is {hero}?", "Who is {hero}?"), "{hero} is {a_kind}."),
    (("What was the weather like?", "How was the weather?", "What kind of day was it?"), "It was {a_weather} day."),
)  # fmt: skip
HELPER_QUESTIONS = (
    ("Who helped {hero}?", "Who is the helper?", "Who came to help?"),
    "{helper} the {helper_kind} helped {hero}.",
)
PLOTS: tuple[Plot, ...] = (
    Plot((OPENING, ("{hero} had {a_treasure} and took it everywhere.", "What {hero} loved most was {their} {treasure}.", "{Pronoun} had {a_treasure}, a gift from {their} grandmother."), MORNING,
          ("But the {treasure} was gone.", "Then {pronoun} saw that the {treasure} was missing.", "{Pronoun} looked for the {treasure}, but it was not there."),
          ("{hero} was very sad and began to cry.", "{hero} was sad and looked everywhere.", "Sadly, {hero} searched every corner."), MEETING,
          ("\"Do not worry, I will help you,\" said {helper}.", "\"Let us look together,\" said {helper}.", "{helper} promised to help."),
          ("They looked all day, and at last they found the {treasure} {hiding}.", "After a long search, they found the {treasure} {hiding}.", "In the evening they found the {treasure} {hiding}."),
          ("{hero} was so happy that {pronoun} hugged {helper}.", "\"Thank you!\" said {hero} with a big smile.", "{hero} danced with joy."), ENDING),
         "{hero} the {kind} lost {their} {treasure} and found it with the help of {helper} the {helper_kind}.", "The Lost {treasure}", (
        (("What did {hero} lose?", "What was missing?", "What was gone?"), "{hero} lost {their} {treasure}."),
        (("Where did they find the {treasure}?", "Where was the {treasure}?", "Where did they find it?"), "They found the {treasure} {hiding}."),
        (("Why was {hero} sad?", "Why did {hero} feel sad?"), "{hero} was sad because {their} {treasure} was gone."), HELPER_QUESTIONS)),
    Plot((OPENING, ("More than anything, {hero} wanted to {skill}.", "{hero} had one wish: {pronoun} wanted to {skill}.", "{Pronoun} dreamed of the day {pronoun} could {skill}."), MORNING,
          ("{hero} tried to {skill}, but it did not work.", "{Pronoun} tried once, and {pronoun} tried again, but {pronoun} could not {skill}.", "{hero} tried and failed."), MEETING,
          ("\"I can teach you,\" said {helper}.", "\"I was once like you,\" said {helper}. \"Let me show you how.\"", "{helper} offered to teach {them}."),
          ("They practiced every day for a week.", "Day after day they practiced together.", "It took many days and much patience."),
          ("At last {hero} could {skill}.", "One evening it worked: {hero} could {skill}!", "In the end, {hero} could {skill} better than anyone near {place}."),
          ("Everyone clapped.", "{helper} was very proud.", "{hero} could hardly believe it."), ENDING),
         "{hero} the {kind} learned to {skill} with the help of {helper} the {helper_kind}.", "How {hero} Learned to {skill}", (
        (("What did {hero} want to do?", "What was {hero}'s wish?", "What did {hero} dream of?"), "{hero} wanted to {skill}."),
        (("Who taught {hero}?", "Who was the teacher?"), "{helper} the {helper_kind} taught {hero}."),
        (("What did {hero} learn?", "What can {hero} do at the end?"), "{hero} learned to {skill}."))),
    Plot((OPENING, MORNING, ("Dark clouds came, and a great storm began.", "Suddenly a storm broke loose.", "In the afternoon a wild storm came up."),
          ("{hero} heard a cry for help from {place}.", "Through the wind {pronoun} heard somebody call.", "Then {hero} heard a small voice call for help."),
          ("It was {helper} the {helper_kind}, who was stuck {hiding}.", "{helper} the {helper_kind} sat {hiding} and could not get out.", "There was {helper}, {a_helper}, trapped {hiding}."),
          ("{hero} was afraid, but {pronoun} did not run away.", "{Pronoun} took a deep breath and went on.", "\"Hold on, I am coming!\" called {hero}."),
          ("With a rope {pronoun} pulled {helper} to safety.", "{Pronoun} reached out and pulled {helper} free.", "Slowly and carefully, {hero} brought {helper} to a dry place."),
          ("To say thanks, {helper} gave {hero} {a_treasure}.", "{helper} thanked {them} and gave {them} {a_treasure}.", "The next day {helper} came with a gift: {a_treasure}."), ENDING),
         "{hero} the {kind} saved {helper} the {helper_kind} in a storm and got {a_treasure} as thanks.", "The Storm", (
        (("Who was stuck?", "Who needed help?", "Who called for help?"), "{helper} the {helper_kind} needed help."),
        (("Where was {helper} stuck?", "Where was {helper}?"), "{helper} was stuck {hiding}."),
        (("What did {helper} give to {hero}?", "What was the gift?", "What did {hero} get as thanks?"), "{helper} gave {hero} {a_treasure}."),
        (("Who saved {helper}?", "Who helped {helper}?"), "{hero} the {kind} saved {helper}."))),
    Plot((OPENING, ("{hero} had no friends and often felt lonely.", "{Pronoun} was often alone and wished for a friend.", "Nobody ever came to visit, and {hero} felt lonely."), MORNING,
          ("{hero} found {a_treasure} {hiding}.", "While {pronoun} was walking, {pronoun} found {a_treasure} {hiding}.", "There was {a_treasure} {hiding}, and {hero} picked it up."),
          ("It belonged to {helper}, {a_helper} who was new near {place}.", "\"That is mine,\" said a voice. It was {helper} the {helper_kind}.", "Soon {pronoun} met {helper} the {helper_kind}, who was looking for it."),
          ("{hero} could have kept it, but {pronoun} gave it back.", "At once {hero} gave it back.", "Without a word {hero} handed it over."),
          ("\"You are honest,\" said {helper}. \"Do you want to play with me?\"", "{helper} smiled and asked {them} to stay for tea.", "\"Thank you,\" said {helper}. \"Will you be my friend?\""),
          ("They played until the sun went down.", "They talked until the stars came out.", "All afternoon they played together."),
          ("{hero} was not lonely any more.", "Now {hero} had a friend.", "{hero} had never been so happy."), ENDING),
         "{hero} the {kind} gave {a_treasure} back to {helper} the {helper_kind} and found a friend.", "A New Friend", (
        (("What did {hero} find?", "What was found?"), "{hero} found {a_treasure}."),
        (("Where was the {treasure}?", "Where did {hero} find the {treasure}?", "Where did {hero} find it?"), "{hero} found the {treasure} {hiding}."),
        (("Who did the {treasure} belong to?", "Whose {treasure} was it?", "Who was the owner of the {treasure}?"), "The {treasure} belonged to {helper} the {helper_kind}."),
        (("Who became {hero}'s friend?", "Who is {hero}'s new friend?"), "{helper} the {helper_kind} became {hero}'s friend."))),
    Plot((OPENING, ("Every year there was a contest near {place}, and the prize was {a_treasure}.", "The whole town spoke of the contest. The winner would get {a_treasure}.", "Soon there would be a contest with {a_treasure} as the prize."), MORNING,
          ("{hero} wanted to win because {pronoun} could {skill}.", "\"I can {skill},\" said {hero}, \"so I will win.\"", "{hero} could {skill} well and hoped to win."),
          ("But {helper} the {helper_kind} could {skill} even better.", "Then {helper} the {helper_kind} showed that {pronoun} was not the only one.", "The best of all was {helper} the {helper_kind}."),
          ("{helper} won, and {hero} came second.", "In the end, {helper} won the contest.", "The judges chose {helper} as the winner."),
          ("{hero} was angry at first.", "At first {hero} wanted to go home.", "{hero} looked at the ground and said nothing."),
          ("But then {pronoun} went to {helper} and said, \"Well done!\"", "Then {hero} took a deep breath and shook the winner's hand.", "Then {hero} smiled and clapped louder than all the others."),
          ("{helper} let {hero} hold the {treasure}, and they shared a cake.", "\"Let us practice together next year,\" said {helper}.", "{helper} was so glad that they became friends."), ENDING),
         "{hero} the {kind} lost a contest to {helper} the {helper_kind} and became a good loser.", "The Contest", (
        (("What was the prize?", "What could the winner get?"), "The prize was {a_treasure}."),
        (("Who won the contest?", "Who was the winner?", "Who won?"), "{helper} the {helper_kind} won the contest."),
        (("Who came second?", "Who lost the contest?"), "{hero} the {kind} came second."),
        (("What could {hero} do well?", "What was {hero} good at?"), "{hero} could {skill}."))),
    Plot((OPENING, ("The winter was long, and food was hard to find.", "That year there was little to eat.", "After a dry summer, all the cupboards were empty."), MORNING,
          ("{hero} found a loaf of bread {hiding}.", "To {their} surprise, {hero} found a loaf of bread {hiding}.", "There was a loaf of bread {hiding}, and {hero} found it."),
          ("{Pronoun} wanted to eat it all at once.", "\"Now I will not be hungry,\" {pronoun} thought.", "{Pronoun} was so hungry that {pronoun} could hardly wait."),
          ("But there sat {helper} the {helper_kind}, who was hungry too.", "Then {pronoun} saw {helper} the {helper_kind}, who had nothing at all.", "Just then {helper} the {helper_kind} came by, thin and cold."),
          ("{hero} broke the bread in two and shared it.", "\"Here, take half,\" said {hero}.", "{hero} gave half of the bread away."),
          ("They sat close together and ate every crumb.", "Never had bread tasted so good.", "They ate and felt warm again."),
          ("In spring, {helper} came back with {a_treasure} for {hero}.", "When spring came, {helper} brought {hero} {a_treasure}.", "In spring {helper} gave {hero} {a_treasure} to say thanks."), ENDING),
         "{hero} the {kind} shared a loaf of bread with {helper} the {helper_kind} in a hungry winter.", "The Loaf of Bread", (
        (("What did {hero} find?", "What was found?"), "{hero} found a loaf of bread."),
        (("Where was the bread?", "Where did {hero} find the bread?"), "{hero} found the bread {hiding}."),
        (("Who did {hero} share the bread with?", "Who was hungry too?", "Who got half of the bread?"), "{hero} shared the bread with {helper} the {helper_kind}."),
        (("What did {helper} bring in spring?", "What did {hero} get in spring?", "What was the gift?"), "{helper} brought {hero} {a_treasure}."))),
    Plot((OPENING, ("One day {hero} borrowed {a_treasure} from {helper} the {helper_kind}.", "{helper} the {helper_kind} had lent {them} {a_treasure}.", "{hero} was allowed to play with {a_treasure} that belonged to {helper} the {helper_kind}."), MORNING,
          ("While {hero} was playing, the {treasure} was damaged.", "{hero} was not careful, and the {treasure} was damaged.", "Suddenly the {treasure} fell into a puddle and was damaged."),
          ("{hero} was afraid to tell the truth and hid it {hiding}.", "Full of fear, {pronoun} hid it {hiding}.", "{Pronoun} did not know what to do and hid it {hiding}."),
          ("All night {hero} could not sleep.", "{Pronoun} could not eat and could not sleep.", "But {their} heart was heavy."),
          ("The next day {pronoun} went to {helper} and told everything.", "In the morning {hero} told {helper} the truth.", "At last {pronoun} said, \"{helper}, it is my fault. I am sorry.\""),
          ("{helper} was not angry.", "\"Thank you for telling me,\" said {helper}.", "{helper} was quiet for a moment and then smiled."),
          ("Together they repaired the {treasure}.", "They sat down and repaired the {treasure} together.", "It took an hour, and then the {treasure} was whole again."), ENDING),
         "{hero} the {kind} damaged {a_treasure} that belonged to {helper} the {helper_kind} and told the truth.", "The Broken {treasure}", (
        (("What was damaged?", "What did {hero} damage?"), "{hero} damaged the {treasure}."),
        (("Where did {hero} hide the {treasure}?", "Where did {hero} hide it?"), "{hero} hid the {treasure} {hiding}."),
        (("Who did the {treasure} belong to?", "Whose {treasure} was it?", "Who was the owner of the {treasure}?"), "The {treasure} belonged to {helper} the {helper_kind}."))),
)  # fmt: skip
ASK_ANY = (
    "Tell me a story.",
    "Tell me a short story.",
    "Can you tell me a story?",
    "Write a short story.",
    "Please tell me a bedtime story.",
    "I would like to hear a story.",
    "Write a story.",
    "tell me a story",
    "Once upon a time",
    "Once upon a time,",
    "Begin a story with once upon a time.",
    "Another story, please.",
)
ASK_KIND = ("Tell me a story about {a_kind}.", "Write a short story about {a_kind}.", "Can you tell me a story about {a_kind}?", "A story about {a_kind}, please.", "I want a story about {a_trait} {kind}.", "Write a story about {a_trait} {kind} near {place}.",
            "Tell me a story about {a_kind} and {a_helper}.", "Write a story with {a_kind} and {a_treasure}.")  # fmt: skip
ASK_NAME = ("Tell me a story about {hero} the {kind}.", "Write a story about {a_kind} named {hero}.", "Tell me a short story about {hero}, {a_trait} {kind}.", "Write a story about {hero} the {kind} and {helper} the {helper_kind}.",
            "Tell a story about {a_kind} called {hero} who lives near {place}.")  # fmt: skip
ASK_FULL = (
    "Tell me a story about {a_kind} named {hero}, {a_helper} named {helper} and {a_treasure}, near {place}.", "Write a story about {hero} the {kind} and {helper} the {helper_kind}. They live near {place} and there is {a_treasure}.",
    "Write a story. Hero: {hero}, {a_kind}. Helper: {helper}, {a_helper}. Place: {place}. Thing: {a_treasure}.", "I want a story about {a_kind} called {hero} near {place} with {a_helper} called {helper} and {a_treasure}.",
)  # fmt: skip
RARE = ("dragon", "boy", "girl", "robot", "king", "queen", "knight", "wizard", "princess", "prince", "giraffe", "elephant", "tiger", "lion", "monkey", "panda", "penguin", "whale", "dolphin", "witch", "giant", "dwarf", "pirate", "sailor",
        "farmer", "teacher", "ghost", "unicorn", "snail", "spider", "bee", "butterfly", "camel", "zebra", "koala", "snake", "lizard", "parrot", "baker", "child")  # fmt: skip
ASK_SUMMARY = (
    "Summarize the story in one sentence.",
    "What is the story about?",
    "Give me a summary.",
    "Sum up the story.",
    "Tell me the story in one sentence.",
)
READ = (
    "Read this story.\n\n{s}\n\n{q}",
    "{s}\n\n{q}",
    "Here is a story: {s}\n{q}",
    "Story: {s}\nQuestion: {q}",
    "{q}\n\n{s}",
    "Read the story and answer the question.\n{s}\n{q}",
)


def cast(draw: Draw, free: bool = False) -> Cast:
    """Who a story is about; a `free` cast has names, kinds, places and things that no list holds."""
    hero, pronoun = words.first_name(draw) if free else ("", draw.choice(("She", "He")))
    hero = hero or draw.choice(words.SHE if pronoun == "She" else words.HE)
    helper = (
        draw.choice([name for name in words.SHE + words.HE if name != hero])
        if not free or draw.chance(0.5)
        else words.made_up(draw).capitalize()
    )
    kinds = draw.sample(words.ANIMALS, 2)
    place, treasure = draw.choice(PLACES), draw.choice(TREASURES)
    if free and draw.chance(0.5):
        kinds[0] = draw.choice(RARE) if draw.chance(0.8) else words.made_up(draw)
    if free and draw.chance(0.3):
        treasure = f"{draw.choice(words.COLORS + words.ADJECTIVES)} {draw.choice(words.OBJECTS)}"
        place = (
            "the "
            + draw.choice(("", *(word + " " for word in words.ADJECTIVES)))
            + draw.choice((*words.NOUNS, "cave", "desert", "city", "school", "station", "swamp", "ruin", "temple"))
        )
    return Cast(hero, kinds[0], pronoun.lower(), helper if helper != hero else helper + "a", kinds[1], place, treasure, draw.choice(TRAITS), draw.choice(WEATHER),
                draw.choice(SKILLS), draw.choice(HIDING), draw.choice(TRUST))  # fmt: skip


def key_of(who: Cast) -> tuple[object, ...]:
    return ("story", who.hero, who.hero_kind, who.helper, who.treasure)


def write(draw: Draw, plot: Plot, who: Cast) -> str:
    sentences = [who.fill(draw.choice(slot)) for slot in plot.slots]
    half = len(sentences) // 2
    gap = draw.choice((" ", " ", "\n\n"))
    return " ".join(sentences[:half]) + gap + " ".join(sentences[half:])


def questions_of(plot: Plot, who: Cast, draw: Draw, story: str) -> list[tuple[str, str]]:
    """Questions the story answers; those whose answer the drawn wording left out are dropped."""
    asked = [*plot.questions, *BASE, (ASK_SUMMARY, plot.summary)]
    if who.weather not in story:
        asked.remove(BASE[3])
    if plot.title.startswith("A New") or plot.title[:7] in ("The Con", "The Loa", "The Bro"):
        asked = [pair for pair in asked if pair[0] != HELPER_QUESTIONS[0]]
    return [(who.fill(draw.choice(wordings)), who.fill(answer)) for wordings, answer in asked]


def telling(draw: Draw) -> Example:
    """A story on request, often with questions about it afterwards."""
    asks = draw.choice((ASK_ANY, ASK_KIND, ASK_NAME, ASK_FULL))
    who, plot = draw.split(lambda: cast(draw, free=asks is ASK_FULL), key_of), draw.choice(PLOTS)
    story = write(draw, plot, who)
    ask = draw.choice(asks)
    messages: list[Message] = [user(who.fill(ask)), assistant(story)]
    for question, answer in draw.some(questions_of(plot, who, draw, story), 0, 4):
        messages += [user(question), assistant(answer)]
    return Example("story", messages, key=key_of(who))


def reading(draw: Draw) -> Example:
    """A story in the user's turn with a question about it, and more questions after that."""
    who, plot = draw.split(lambda: cast(draw, free=draw.chance(0.5)), key_of), draw.choice(PLOTS)
    story = write(draw, plot, who)
    messages: list[Message] = []
    for question, answer in draw.some(questions_of(plot, who, draw, story), 1, 3):
        text = question if messages else draw.choice(READ).format(s=story, q=question)
        messages += [user(text), assistant(answer)]
    return Example("story_questions", messages, key=key_of(who))


def raw_story(draw: Draw) -> Example:
    """A story as plain text without turns, so that a prompt without a chat template continues as one."""
    who, plot = draw.split(lambda: cast(draw), key_of), draw.choice(PLOTS)
    title = draw.choice(("", "", who.fill(plot.title) + "\n\n"))
    return Example("raw", [], key=key_of(who), text=title + write(draw, plot, who))


MAKERS: tuple[Callable[[Draw], Example], ...] = (telling, reading, raw_story)
