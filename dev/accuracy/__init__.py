"""The error of products in 8 bits against fp64, beside that of another library's algorithm."""
