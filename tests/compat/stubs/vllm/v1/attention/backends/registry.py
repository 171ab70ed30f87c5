from enum import Enum

_OVERRIDES = {}


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    @classmethod
    def register(cls, name, value):
        if name in cls._member_map_:
            raise ValueError(f"Backend {name} already exists")
        member = object.__new__(cls)
        member._name_, member._value_ = name, value
        setattr(cls, name, member)
        cls._member_map_[name] = member
        cls._value2member_map_[value] = member
        cls._member_names_.append(name)
        return member

    def get_path(self, include_classname=True):
        path = _OVERRIDES.get(self, self.value)
        return path if include_classname else path.rsplit(".", 1)[0]

    def get_class(self):
        import importlib

        module, name = self.get_path().rsplit(".", 1)
        return getattr(importlib.import_module(module), name)


def register_backend(backend, class_path=None, is_mamba=False):
    if isinstance(backend, str):
        backend = AttentionBackendEnum.register(backend, class_path or "")
    if class_path is not None:
        _OVERRIDES[backend] = class_path
    return lambda cls: cls
