"""`python -m dev.figures`: figures of benchmark results, by matplotlib."""
