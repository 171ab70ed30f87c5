"""`python -m cutlass_attn`: the same as the command `cutlass-attn`."""

from .tools.cli import main

raise SystemExit(main())
