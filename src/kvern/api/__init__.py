"""The APIs' forms: bodies of requests as what is asked, and outputs as answers and events. No HTTP, no files.

errors        what is answered instead, with the status and in the form that an API's clients know
fields        the fields that several APIs take, and how a field is checked
limits        what one request may ask for at most
conversation  messages, tools and thinking of a chat
forms         the form that an answer is to have
completions   /v1/chat/completions and /v1/completions: bodies; completion_answers and choices: their answers
batch_rows    rows of OpenAI's batch files, each a body for a route
embeddings, scores, responses (and response_items), messages (and message_blocks)    each an API

A body is checked here once, whoever it came from: `kvern.server` reads it off a socket, `kvern.batch` out of a file.
"""
