ATTENTION_BACKEND_CHOICES = ["triton", "fa3"]
add_attention_backend_choices = ATTENTION_BACKEND_CHOICES.extend
CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS = ["fa3"]
add_chunked_prefix_cache_attention_backend = (
    CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS.append
)
