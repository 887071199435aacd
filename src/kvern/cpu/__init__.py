"""Kernels for CPUs: C++ that the machine's own compiler builds for its processor, kept in the cache folder.

    sources/     the kernels, behind functions of C
    processor.py which instructions they use
    build.py     compiles them, or finds what was compiled into the package
    library.py   loads what was compiled, and what its functions are called with
    check.py     each group of kernels against PyTorch, in a process that may crash
    ready.py     which groups work here, as a start asks; builds and checks in the background what is not known

PyTorch does all that no group does.
"""
