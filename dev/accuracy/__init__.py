"""The error of products in 8 bits against fp64, next to that of another library's algorithm."""
