"""Tool calls and reasoning: parsers of what models write around their answers, and grammars that enforce it.

buffered     the base of parsers: a growing text, states, partial markers, blanks around calls
json_call    one {"name": ..., "arguments": {...}}, or arguments alone; json_mending repairs what is almost JSON
json_calls   calls that are JSON objects; learning finds their form by rendering a template
mistral, gemma, pythonic, marked_json, xml_functions, glm   formats of one or two families each, as classes with the
             protocol of `tool_format`
xml_call     the common part of formats with parameters between XML tags
xml_values   the values of such parameters: text, or what the schema says
harmony      gpt-oss's turns, in which thinking, calls and answers are separate messages
formats      detection of a chat template's format
thinking     <think> and similar marks
definitions  the tools of a request, checked
grammar      one grammar for thinking, calls and a structured answer
chat         the entry point: from a conversation to a prompt, parameters and a reader of the answer
"""
