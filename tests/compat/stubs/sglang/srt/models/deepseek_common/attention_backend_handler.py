from typing import ClassVar


class AttentionBackendRegistry:
    _handlers: ClassVar = {}

    @classmethod
    def register(cls, backend_name, handler_func):
        cls._handlers[backend_name] = handler_func

    @classmethod
    def get_handler(cls, backend_name):
        return cls._handlers.get(backend_name, cls._handlers.get("triton"))


def handle_attention_fa3(attn, forward_batch):
    raise NotImplementedError
