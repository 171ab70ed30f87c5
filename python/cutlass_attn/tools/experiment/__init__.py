"""`cutlass-attn bench`: the library's kernels beside PyTorch's and those of other libraries.

`shapes` says what is computed, `impls` by whom, `timing` how it is timed and `stats` what is made
of the times; `runner` puts them together into a `report`, which `table` prints and `plot` draws.
docs/benchmarking.md describes the method and the file.
"""
