import torch


def merge_attn_states(
    output,
    prefix_output,
    prefix_lse,
    suffix_output,
    suffix_lse,
    output_lse=None,
    prefill_tokens_with_context=None,
    output_scale=None,
):
    parts = (prefix_output, prefix_lse), (suffix_output, suffix_lse)
    lse = torch.logaddexp(prefix_lse, suffix_lse)
    shares = [(x - lse).exp().nan_to_num(0).T[..., None] for _, x in parts]
    output.copy_(sum(out.float() * share for (out, _), share in zip(parts, shares)))
    if output_lse is not None:
        output_lse.copy_(lse)
