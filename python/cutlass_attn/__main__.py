"""`python -m cutlass_attn`: the same as the command `cutlass-attn`."""

from .cli import main

raise SystemExit(main())
