"""Reads the machine code of kernels, without a GPU, and compares it to what it should contain.

Nothing here imports the package but `_build`: ctest reads a library before it is installed.
"""
