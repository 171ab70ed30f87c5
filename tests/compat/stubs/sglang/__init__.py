"""What cutlass_attn uses of SGLang 0.5.23: its names and signatures, which tests compare with
SGLang's where that is installed."""

__version__ = "0.5.23"
