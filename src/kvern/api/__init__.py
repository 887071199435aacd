"""Bodies of requests and their answers in the formats of each API, without HTTP and without files.

errors        errors as answers: their HTTP status and OpenAI's format
fields        fields that several APIs take beside those of `SamplingParams`, which all take; checks of a field's type,
              and the limits of one request
conversation  messages, tools and thinking of a chat
forms         the form of an answer: JSON, a schema, a grammar
completions   bodies of /v1/chat/completions and /v1/completions; completion_answers: their answers
batch_rows    rows of OpenAI's batch files, each a body for a route
embeddings, scores, responses (and response_items), messages (and message_blocks)    one API each

Each body is checked here: `kvern.server` reads it from a socket, `kvern.batch` from a file.
"""
