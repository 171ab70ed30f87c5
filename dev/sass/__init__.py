"""Machine code of the kernels: what it has and what it should have, read without a GPU.

Nothing here imports the package but `_build`: ctest reads a library before it is installed.
"""
