"""Ways to switch by one line: cutlass_attn under the names that programs already call.

    from cutlass_attn.compat import flash_attn     # the functions of the package flash_attn
    from cutlass_attn.compat import sdpa           # torch's scaled_dot_product_attention
    from cutlass_attn.compat import transformers   # an attention implementation of transformers
    from cutlass_attn.compat import diffusers      # an attention backend of diffusers

All need torch; the last two need the package that they are named after, and say which versions of
it they support. docs/drop-in.md is the user's page.
"""
