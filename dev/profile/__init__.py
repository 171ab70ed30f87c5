"""`python -m dev.profile`: every GPU variant's figures beside its gates."""
