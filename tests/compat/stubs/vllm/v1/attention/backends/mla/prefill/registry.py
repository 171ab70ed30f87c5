from enum import Enum

_OVERRIDES = {}


class MLAPrefillBackendEnum(Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.mla.prefill.flash_attn.FlashAttnPrefillBackend"
    CUSTOM = None

    @classmethod
    def register(cls, name, value):
        if name in cls._member_map_:
            raise ValueError(f"MLA prefill backend {name} already exists")
        member = object.__new__(cls)
        member._name_, member._value_ = name, value
        setattr(cls, name, member)
        cls._member_map_[name] = member
        cls._value2member_map_[value] = member
        cls._member_names_.append(name)
        return member

    def get_path(self):
        return _OVERRIDES.get(self, self.value)

    def get_class(self):
        import importlib

        module, name = self.get_path().rsplit(".", 1)
        return getattr(importlib.import_module(module), name)


def register_mla_prefill_backend(backend, class_path=None):
    if isinstance(backend, str):
        backend = MLAPrefillBackendEnum.register(backend, class_path or "")
    if class_path is not None:
        _OVERRIDES[backend] = class_path
    return lambda cls: cls
