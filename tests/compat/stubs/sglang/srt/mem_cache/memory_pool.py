from dataclasses import dataclass


@dataclass
class KVWriteLoc:
    loc: object
    swa_loc: object = None
    full_loc: object = None
    physical: bool = False

    @classmethod
    def for_layer(cls, forward_batch, layer, *, swa_loc=None, full_loc=None):
        if layer.is_cross_attention:
            return cls(forward_batch.encoder_out_cache_loc, swa_loc, full_loc)
        physical = forward_batch.out_cache_loc_is_physical
        return cls(forward_batch.out_cache_loc, swa_loc, full_loc, physical)


def unwrap_write_loc(loc_info):
    if isinstance(loc_info, KVWriteLoc):
        return loc_info.loc, loc_info.swa_loc, loc_info.full_loc
    return loc_info, None, None


class MLATokenToKVPool:
    def get_key_buffer(self, layer_id):
        raise NotImplementedError

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, layer_id_override=None):
        raise NotImplementedError

    def set_mla_kv_buffer(
        self, layer, loc_info, cache_k_nope, cache_k_rope, layer_id_override=None
    ):
        raise NotImplementedError
