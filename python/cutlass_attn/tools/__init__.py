"""The command `cutlass-attn`. The rest of the package never imports this folder."""
