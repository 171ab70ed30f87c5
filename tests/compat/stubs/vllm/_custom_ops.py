"""Those that gather latents, in torch; vLLM has them for GPUs. The tests give vLLM these."""

import torch


def gather_and_maybe_dequant_cache(
    src_cache,
    dst,
    block_table,
    cu_seq_lens,
    token_to_seq,
    num_tokens,
    kv_cache_dtype,
    scale,
    seq_starts=None,
):
    size = src_cache.shape[1]
    for i in range(num_tokens):
        seq = token_to_seq[i]
        at = i - cu_seq_lens[seq] + seq_starts[seq]
        dst[i] = src_cache[block_table[seq, at // size], at % size]


def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache,
    dst,
    block_table,
    workspace_starts,
    batch_size,
    seq_starts=None,
    host_cache=None,
    host_row_ids=None,
    device_row_ids=None,
):
    e4m3 = src_cache[..., :512].view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    scales = src_cache[..., 512:528].view(torch.float32)[..., None]
    rotated = src_cache[..., 528:].view(torch.bfloat16)
    latents = torch.cat([(e4m3 * scales).flatten(-2).bfloat16(), rotated], dim=-1)
    rows = torch.arange(len(dst))
    token_to_seq = torch.searchsorted(workspace_starts[1:].long(), rows, right=True)
    more = workspace_starts, token_to_seq, len(dst), "auto", None, seq_starts
    gather_and_maybe_dequant_cache(latents, dst, block_table, *more)
