"""What cutlass_attn uses of vLLM 0.33.0: its names and signatures, which tests compare with vLLM's
where that is installed."""

__version__ = "0.33.0"
