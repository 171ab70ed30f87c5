ATTENTION_BACKEND_CHOICES = ["triton", "fa3"]
add_attention_backend_choices = ATTENTION_BACKEND_CHOICES.extend
