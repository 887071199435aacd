"""The tools that training conversations offer: name, description, parameters, requests, result and final answer.

A request that leaves a parameter out calls the tool without it. In the answer, `{name}` is an argument or a result value.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from training import words
from training.draw import Draw

Maker = Callable[[Draw], Any]


@dataclass(frozen=True)
class Parameter:
    """A JSON-schema type, its description and a maker of values; `choices` makes it an enumeration."""

    type: str
    description: str
    make: Maker
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class CatalogTool:
    description: str
    parameters: dict[str, Parameter]
    requests: tuple[str, ...]
    result: dict[str, Maker]
    answer: str


def text(description: str, make: Maker) -> Parameter:
    return Parameter("string", description, make)


def whole(description: str, low: int, high: int) -> Parameter:
    return Parameter("integer", description, lambda draw: draw.randint(low, high))


def choice(description: str, *choices: str) -> Parameter:
    return Parameter("string", description, lambda draw: draw.choice(choices), choices)


def among(*items: Any) -> Maker:
    return lambda draw: draw.choice(items)


def between(low: int, high: int) -> Maker:
    return lambda draw: draw.randint(low, high)


def person(draw: Draw) -> str:
    return words.person(draw)[0]


def subject(draw: Draw) -> str:
    return f"{draw.choice(words.ADJECTIVES)} {draw.choice(words.NOUNS + words.FRUITS + words.ANIMALS)}"


def expression(draw: Draw) -> str:
    return f"{draw.randint(1, 9999)} {draw.choice('+-*/')} {draw.randint(1, 9999)}"


CITY = text("Name of the city", words.city)
ORIGIN, DESTINATION = text("City of departure", words.city), text("City of arrival", words.city)
DATE, TIME = text("Date", words.date), text("Time of day, HH:MM", words.clock_time)
ROOM = choice("Room of the house", "kitchen", "bedroom", "bathroom", "hall", "office", "garage", "living room")
LANGUAGE = choice(
    "Target language", "French", "German", "Spanish", "Italian", "Norwegian", "Dutch", "Polish", "Turkish"
)
CURRENCIES = ("USD", "EUR", "GBP", "NOK", "JPY", "CHF", "SEK", "INR")
OK = {"status": among("ok")}

CATALOG: dict[str, CatalogTool] = {
    "get_weather": CatalogTool("Get the current weather in a city.", {"city": CITY, "unit": choice("Temperature unit", "celsius", "fahrenheit")}, (
        "What is the weather in {city}?", "How is the weather in {city} right now?", "Is it raining in {city}?", "What's the weather like in {city} today?", "Should I take an umbrella in {city}?", "Do I need a coat in {city}?", "Weather in {city}?",
        "What's the weather like in {city}?", "Tell me the weather in {city} in {unit}.", "How warm is it in {city}, in {unit}?", "What is the temperature in {city}?"),
        {"temperature": between(-15, 38), "condition": among("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")}, "It is {condition} in {city}, at {temperature} degrees."),
    "get_time": CatalogTool("Get the current local time in a city.", {"city": CITY}, (
        "What time is it in {city}?", "Tell me the local time in {city}.", "Current time in {city}?", "How late is it in {city}?"),
        {"time": words.clock_time}, "It is {time} in {city}."),
    "search_web": CatalogTool("Search the web.", {"query": text("What to search for", subject)}, (
        "Search the web for {query}.", "Look up {query} online.", "Find pages about {query}.", "Google {query} for me.", "Search for {query}."),
        {"results": between(0, 900)}, "I found {results} pages about {query}."),
    "send_email": CatalogTool("Send an email.", {"to": text("Address of the recipient", words.email), "subject": text("Subject line", subject)}, (
        "Send an email to {to} about {subject}.", "Email {to} with the subject {subject}.", "Write to {to} with the subject {subject}.", "Please mail {to} about {subject}."),
        OK, "I sent the email to {to}."),
    "create_event": CatalogTool("Add an event to the calendar.", {"title": text("Title of the event", among("Lunch", "Team meeting", "Dentist", "Yoga class", "Interview", "Birthday party", "Review", "Dinner")), "date": DATE, "time": TIME}, (
        "Add {title} to my calendar on {date} at {time}.", "Put {title} in the calendar for {date} at {time}.", "Schedule {title} on {date} at {time}.", "Create an event called {title} on {date}.", "I have {title} on {date} at {time}, please note it."),
        OK, "{title} is in your calendar on {date}."),
    "set_alarm": CatalogTool("Set an alarm.", {"time": TIME}, ("Set an alarm for {time}.", "Wake me up at {time}.", "I need an alarm at {time}.", "Please wake me at {time}."), OK, "The alarm is set for {time}."),
    "set_timer": CatalogTool("Start a countdown timer.", {"minutes": whole("Length in minutes", 1, 120)}, ("Set a timer for {minutes} minutes.", "Start a {minutes} minute timer.", "Count down {minutes} minutes.", "Timer, {minutes} minutes."), OK, "The timer runs for {minutes} minutes."),
    "convert_currency": CatalogTool("Convert an amount of money between currencies.", {"amount": Parameter("number", "Amount to convert", words.price), "from_currency": choice("Currency code", *CURRENCIES), "to_currency": choice("Currency code", *CURRENCIES)}, (
        "Convert {amount} {from_currency} to {to_currency}.", "How much is {amount} {from_currency} in {to_currency}?", "Change {amount} {from_currency} into {to_currency}.", "What are {amount} {from_currency} worth in {to_currency}?"),
        {"result": between(1, 9999)}, "{amount} {from_currency} are {result} {to_currency}."),
    "calculate": CatalogTool("Evaluate an arithmetic expression.", {"expression": text("Expression", expression)}, (
        "Calculate {expression}.", "What is {expression}?", "Compute {expression} with the calculator.", "Please work out {expression}."),
        {"value": between(1, 99999)}, "{expression} = {value}"),
    "multiply": CatalogTool("Multiply two numbers.", {"a": whole("First factor", 0, 9999), "b": whole("Second factor", 0, 999)}, (
        "Multiply {a} and {b}.", "What is {a} times {b}?", "{a} * {b}", "Multiply {a} by {b}.", "Compute {a} times {b}.", "How much is {a} times {b}?"), {"product": between(0, 99999)}, "{a} times {b} is {product}."),
    "divide": CatalogTool("Divide a number by another.", {"a": whole("Number to divide", 0, 9999), "b": whole("Divisor", 1, 99)}, (
        "Divide {a} by {b}.", "What is {a} divided by {b}?", "{a} / {b}", "How often does {b} go into {a}?"), {"quotient": between(0, 999)}, "{a} divided by {b} is {quotient}."),
    "get_stock_price": CatalogTool("Get the latest price of a share.", {"symbol": text("Ticker symbol", lambda draw: "".join(draw.choice("ABCDEFGHIKLMNOPQRSTVXZ") for _ in range(draw.randint(3, 4))))}, (
        "What is the price of {symbol}?", "How is the {symbol} share doing?", "Get the stock price of {symbol}.", "Quote for {symbol}, please.", "What does {symbol} trade at?"),
        {"price": words.price}, "{symbol} trades at {price}."),
    "translate": CatalogTool("Translate a text.", {"text": text("Text to translate", among("good morning", "thank you", "see you tomorrow", "where is the station", "I am hungry", "how are you", "happy birthday", "good night", "my name is Tom", "the book is red")), "language": LANGUAGE}, (
        "Translate '{text}' to {language}.", "How do you say '{text}' in {language}?", "What is '{text}' in {language}?", "Put '{text}' into {language}."),
        {"translation": lambda draw: words.made_up(draw) + " " + words.made_up(draw)}, "In {language} it is '{translation}'."),
    "play_music": CatalogTool("Play music by an artist.", {"artist": text("Artist or band", person)}, ("Play something by {artist}.", "Play {artist}.", "I want to hear {artist}.", "Put on some music by {artist}."), {"song": words.title}, "Now playing {song} by {artist}."),
    "book_table": CatalogTool("Reserve a table in a restaurant.", {"restaurant": text("Name of the restaurant", lambda draw: words.made_up(draw).capitalize()), "people": whole("Number of guests", 1, 12), "time": TIME}, (
        "Book a table at {restaurant} for {people} people at {time}.", "Reserve a table for {people} at {restaurant} at {time}.", "I need a table for {people} at {restaurant}, {time}.", "Get us a table at {restaurant} at {time}, we are {people}."),
        {"reference": between(1000, 9999)}, "Your table at {restaurant} is booked, reference {reference}."),
    "book_flight": CatalogTool("Book a flight.", {"origin": ORIGIN, "destination": DESTINATION, "date": DATE}, (
        "Book a flight from {origin} to {destination} on {date}.", "I want to fly from {origin} to {destination} on {date}.", "Get me a flight to {destination} from {origin} on {date}.", "Flight from {origin} to {destination}, {date}, please."),
        {"price": words.price}, "The flight from {origin} to {destination} is booked for {price} euros."),
    "find_hotel": CatalogTool("Find a hotel.", {"city": CITY, "nights": whole("Number of nights", 1, 21)}, (
        "Find a hotel in {city} for {nights} nights.", "I need a room in {city} for {nights} nights.", "Look for hotels in {city}.", "Where can I stay in {city} for {nights} nights?"),
        {"hotel": lambda draw: "Hotel " + words.made_up(draw).capitalize(), "price": words.price}, "{hotel} in {city} has rooms for {price} euros."),
    "add_to_cart": CatalogTool("Put an item into the shopping cart.", {"item": text("Item", among(*words.OBJECTS)), "quantity": whole("How many", 1, 50)}, (
        "Add {quantity} of the item {item} to my cart.", "Put the {item} in my cart, {quantity} pieces.", "Add a {item} to the cart.", "I want to buy the {item}, quantity {quantity}."),
        {"total": words.price}, "I added the {item}. Your cart comes to {total} euros."),
    "track_order": CatalogTool("Get the status of an order.", {"order_id": text("Order number", lambda draw: draw.choice("ABKQX") + str(draw.randint(100, 99999)))}, (
        "Where is my order {order_id}?", "Track order {order_id}.", "What is the status of {order_id}?", "Has order {order_id} been shipped?"),
        {"status": among("shipped", "pending", "delivered", "on its way", "cancelled")}, "Order {order_id} is {status}."),
    "get_news": CatalogTool("Get the latest headlines on a topic.", {"topic": text("Topic", among("sports", "science", "music", "politics", "technology", "health", "travel", "film", "business", "food"))}, (
        "What is the news about {topic}?", "Show me the {topic} headlines.", "Any news on {topic}?", "Latest {topic} news, please."), {"headline": words.title}, "The top {topic} headline is '{headline}'."),
    "set_light": CatalogTool("Switch the light in a room on or off.", {"room": ROOM, "on": Parameter("boolean", "true for on, false for off", among(True, False))}, (
        "Turn {on} the light in the {room}.", "Switch the {room} light {on}.", "Light {on} in the {room}, please.", "{on} with the light in the {room}."), OK, "Done, the {room} light is set."),
    "set_temperature": CatalogTool("Set the temperature of a room.", {"room": ROOM, "degrees": whole("Degrees Celsius", 12, 28)}, (
        "Set the {room} to {degrees} degrees.", "Make the {room} {degrees} degrees warm.", "Heat the {room} to {degrees} degrees.", "Temperature in the {room}: {degrees}."), OK, "The {room} is set to {degrees} degrees."),
    "read_file": CatalogTool("Read a text file.", {"path": text("Path of the file", lambda draw: f"{words.made_up(draw)}/{words.made_up(draw)}.{draw.choice(('txt', 'md', 'csv', 'json', 'py'))}")}, (
        "Read {path}.", "What is in {path}?", "Open the file {path}.", "Show me the file {path}."), {"lines": between(1, 900)}, "{path} has {lines} lines."),
    "write_note": CatalogTool("Save a note.", {"note": text("Text of the note", lambda draw: draw.choice(("buy a ", "bring the ", "repair the ", "find the ", "clean the ")) + draw.choice(words.OBJECTS))}, (
        "Make a note: {note}.", "Remember to {note}.", "Note down '{note}'.", "Save a note that says {note}."), OK, "I noted: {note}."),
    "create_user": CatalogTool("Create a user account.", {"name": text("Name", person), "email": text("Email address", words.email)}, (
        "Create a user called {name} with the email {email}.", "Add {name} as a user, email {email}.", "Make an account for {name} ({email}).", "New user: {name}, {email}."), {"id": between(1, 9999)}, "The user {name} has the number {id}."),
    "delete_user": CatalogTool("Delete a user account.", {"user_id": whole("Number of the user", 1, 9999)}, ("Delete user {user_id}.", "Remove the account {user_id}.", "Please delete the user with the id {user_id}.", "User {user_id} must go."), OK, "User {user_id} is deleted."),
    "transfer_money": CatalogTool("Transfer money to a person.", {"recipient": text("Who receives the money", person), "amount": Parameter("number", "Amount in euros", words.price)}, (
        "Send {amount} euros to {recipient}.", "Transfer {amount} to {recipient}.", "Pay {recipient} {amount} euros.", "Give {recipient} {amount} euros from my account."), {"balance": words.price}, "I sent {amount} euros to {recipient}. Your balance is {balance} euros."),
    "roll_dice": CatalogTool("Roll dice.", {"sides": whole("Sides of each die", 4, 20), "count": whole("Number of dice", 1, 6)}, ("Roll {count} dice with {sides} sides.", "Throw a die with {sides} sides.", "Roll a {sides} sided die {count} times.", "I need {count} dice rolls, {sides} sides."), {"sum": between(1, 60)}, "The dice show {sum}."),
    "find_recipe": CatalogTool("Find a recipe with an ingredient.", {"ingredient": text("Main ingredient", among(*words.FRUITS, "rice", "fish", "potato", "carrot", "cheese", "egg"))}, (
        "What can I cook with {ingredient}?", "Find a recipe with {ingredient}.", "I have {ingredient}, what can I make?", "Give me a {ingredient} recipe."), {"recipe": lambda draw: words.made_up(draw) + " pie"}, "You can make {recipe} with {ingredient}."),
    "get_distance": CatalogTool("Get the distance between two cities.", {"origin": ORIGIN, "destination": DESTINATION}, (
        "How far is it from {origin} to {destination}?", "Distance from {origin} to {destination}?", "How many kilometers are between {origin} and {destination}?", "Tell me how far {destination} is from {origin}."), {"kilometers": between(20, 9999)}, "From {origin} to {destination} it is {kilometers} kilometers."),
    "call_taxi": CatalogTool("Order a taxi.", {"address": text("Pick-up address", lambda draw: f"{words.surname(draw)} Street {draw.randint(1, 99)}"), "time": TIME}, (
        "Call a taxi to {address} at {time}.", "I need a taxi at {address}.", "Taxi to {address} for {time}, please.", "Order a cab for {time} at {address}."), {"minutes": between(2, 40)}, "The taxi comes to {address} in {minutes} minutes."),
    "lookup_word": CatalogTool("Look up a word in the dictionary.", {"word": text("The word", words.made_up)}, ("Look up the word {word}.", "What does the dictionary say about {word}?", "Define {word} with the dictionary.", "Dictionary: {word}"), {"meaning": subject}, "{word} means {meaning}."),
}  # fmt: skip

VERBS = (
    "create",
    "update",
    "delete",
    "find",
    "send",
    "start",
    "stop",
    "check",
    "book",
    "cancel",
    "print",
    "share",
    "open",
    "close",
    "copy",
    "rename",
    "count",
    "archive",
)
NOUNS = ("invoice", "report", "ticket", "contact", "project", "playlist", "backup", "reminder", "room", "package", "server", "channel", "photo", "form",
         "task", "folder", "contract", "device", "job", "model", "queue", "table", "page", "label")  # fmt: skip
FREE_PARAMETERS: dict[str, Parameter] = {
    "name": text("Name", lambda draw: words.made_up(draw)), "customer": text("Customer", person), "city": CITY, "amount": whole("Amount", 1, 999),
    "date": DATE, "color": choice("Color", *words.COLORS[:5]), "priority": choice("Priority", "low", "medium", "high"), "email": text("Email", words.email),
    "count": whole("How many", 1, 99), "owner": text("Owner", person), "id": whole("Number", 1, 99999), "time": TIME, "title": text("Title", words.title),
    "size": choice("Size", "small", "medium", "large"), "weight": Parameter("number", "Weight in kg", words.price), "category": text("Category", words.made_up),
    "language": LANGUAGE, "days": whole("Number of days", 1, 60), "code": text("Code", lambda draw: f"{draw.choice('ABCDEF')}{draw.randint(10, 999)}"),
}  # fmt: skip

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "city": ("location", "place", "town"), "time": ("at", "hour", "clock_time"), "date": ("day", "when"), "query": ("q", "text", "search_terms"), "to": ("recipient", "address", "email"), "subject": ("topic", "title"),
    "amount": ("value", "sum"), "from_currency": ("source", "base"), "to_currency": ("target", "quote"), "origin": ("from_city", "start", "departure"), "destination": ("to_city", "end", "arrival"), "name": ("full_name", "label"),
    "item": ("product", "article"), "quantity": ("count", "number", "pieces"), "order_id": ("id", "order", "order_number"), "room": ("area", "where"), "people": ("guests", "party_size"), "path": ("file", "filename", "file_path"),
    "language": ("target_language", "lang"), "minutes": ("duration", "length_minutes"), "a": ("x", "first"), "b": ("y", "second"), "symbol": ("ticker", "share"), "word": ("term", "entry"), "expression": ("formula", "input"),
}  # fmt: skip
OTHER_VERBS = {"get": ("fetch", "lookup", "query", "check"), "search": ("find", "query"), "create": ("add", "make", "new"), "set": ("change", "update", "adjust"), "find": ("search", "get"), "book": ("reserve", "order"),
               "send": ("write", "deliver"), "read": ("open", "load"), "delete": ("remove", "drop"), "call": ("order", "request"), "play": ("start", "stream")}  # fmt: skip


def renamed(draw: Draw, name: str, tool: CatalogTool) -> tuple[str, CatalogTool]:
    """The tool with another name or other parameter names, as another program might define it."""
    names: dict[str, str] = {}
    for key in tool.parameters:
        other = (
            draw.choice(OTHER_NAMES.get(key, (f"{key}_value", f"the_{key}", f"{key}_text")))
            if draw.chance(0.6)
            else key
        )
        names[key] = key if other in names.values() or other in tool.parameters or other in tool.result else other
    verb, _, rest = name.partition("_")
    if rest and draw.chance(0.5):
        name = draw.choice(
            (
                f"{draw.choice(OTHER_VERBS.get(verb, (verb,)))}_{rest}",
                f"{rest}_{verb}",
                verb + rest.title().replace("_", ""),
                rest,
            )
        )

    def swap(template: str) -> str:
        return re.sub(r"{(\w+)}", lambda match: "{" + names.get(match[1], match[1]) + "}", template)

    parameters = {names[key]: parameter for key, parameter in tool.parameters.items()}
    return name, replace(
        tool, parameters=parameters, requests=tuple(map(swap, tool.requests)), answer=swap(tool.answer)
    )


def made_up_tool(draw: Draw) -> tuple[str, CatalogTool]:
    """A tool that no list holds, so that the model reads the definitions instead of knowing them."""
    verb, noun = draw.choice(VERBS), (words.made_up(draw) if draw.chance(0.3) else draw.choice(NOUNS))
    names = draw.some(list(FREE_PARAMETERS), 1, 3)
    parts = [f"{name} {{{name}}}" for name in names]
    listed = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    the = "an" if noun[0] in "aeiou" else "a"
    requests = (f"{verb.capitalize()} {the} {noun} with {listed}.", f"Please {verb} the {noun} with {listed}.", f"I want to {verb} {the} {noun}: {', '.join(parts)}.",
                f"Can you {verb} the {noun} with {listed}?")  # fmt: skip
    tool = CatalogTool(
        f"{verb.capitalize()} {the} {noun}.",
        {name: FREE_PARAMETERS[name] for name in names},
        requests,
        OK,
        f"The {noun} request is done.",
    )
    return f"{verb}_{noun}", tool
