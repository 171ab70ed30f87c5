"""`cutlass-attn tune`: looks for a better tile of a kernel, and has dispatch take it."""
