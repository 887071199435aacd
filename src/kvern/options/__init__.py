"""Options by name, and what they are called elsewhere.

`vllm.py` is the table of vLLM's flags, which the command line, configuration files and the arguments of `LLM` share;
`rules.py` has the kinds of its rows, `values.py` converts values to the types of options, and `arguments.py` reads the
arguments of `LLM`.
"""
