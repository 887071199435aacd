"""Kernels for CPUs: C++ that the machine's own compiler builds for its processor, stored in the cache folder.

    sources/     the kernels, as functions with a C interface
    processor.py the instruction sets that they may use
    build.py     compiles them, or finds a library in the package
    library.py   loads the library and calls its functions
    check.py     compares each group of kernels with PyTorch, in a process that may crash
    ready.py     tells a start which groups work here; builds and checks unknown ones in the background

PyTorch computes everything for which no group works.
"""
