"""Tool calls and reasoning: what models write around their answers, read while it comes and demanded where it must.

pieces       an answer's parts: content, reasoning, the beginning of a call, its arguments
buffered     a parser's growing text: states, what may still become a marker, blanks around calls
json_call    one {"name": ..., "arguments": {...}}, or arguments alone; json_mending puts right what is not quite JSON
json_calls   calls that are JSON objects; learning finds their form by rendering a template
mistral, gemma, pythonic, marked_json, xml_functions, glm   formats of one family or two each, behind the
             protocol of `tool_format`
xml_call     what the formats have in common that put parameters between XML tags
xml_values   their values: text, or what the schema says
harmony      gpt-oss's turns, in which thinking, calls and answers are messages of their own
formats      which format a chat template speaks
thinking     <think> and kin
definitions  the tools of a request, checked
grammar      one grammar out of thinking, calls and a structured answer
chat         ties them together: a conversation becomes a prompt, parameters and a reader of the answer
"""
