"""`cutlass-attn profile`: every GPU variant's figures beside its gates."""
