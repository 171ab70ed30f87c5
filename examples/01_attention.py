"""Attention on whatever is here: a GPU if torch finds one, and the CPU.

Run it with `python examples/01_attention.py`. It needs torch.
"""

import cutlass_attn
import torch


def main() -> None:
    devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    for device in devices:
        # 8 query heads share 2 key/value heads; neither length is a multiple of a tile.
        torch.manual_seed(0)
        q = torch.randn(2, 8, 200, 64, dtype=torch.float16, device=device)
        k = torch.randn(2, 2, 333, 64, dtype=torch.float16, device=device)
        v = torch.randn(2, 2, 333, 64, dtype=torch.float16, device=device)

        print(f"--- {device} ---")
        explanation = cutlass_attn.explain(q, k, v, causal=True)  # prints as a table
        print(f"kernel {explanation.chosen.key}, one of {len(explanation.verdicts)}")

        out, lse = cutlass_attn.attention(q, k, v, causal=True, return_lse=True)
        print(f"out {tuple(out.shape)}, lse {tuple(lse.shape)}")

        # The same from PyTorch. Its own causal mask is aligned top-left, hence the tensor.
        mask = torch.ones(200, 333, dtype=torch.bool, device=device).tril(333 - 200)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=True
        )
        print(f"largest difference from PyTorch: {(out - expected).abs().max().item():.2e}")

        # Each query sees the 64 keys before its own; checked against a scalar kernel if there is
        # one for this device.
        verify = device == "cuda" or cutlass_attn.build_info().simt != "none"
        cutlass_attn.attention(q, k, v, causal=True, window=64, verify=verify)
        print("sliding window: " + ("verified" if verify else "computed"))


if __name__ == "__main__":
    main()
