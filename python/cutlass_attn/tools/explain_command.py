"""`cutlass-attn explain`: which kernel a call would run, on this machine or on another GPU."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import click
import numpy as np

from .._explain import explain as explained
from .console import DTYPE, SIZE, command, json_option
from .document import document, write
from .experiment.environment import default_device

SIZES_FORM = "BxHxSxD"


class _Sizes(click.ParamType):
    name = SIZES_FORM

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        if re.fullmatch(r"[1-9]\d{0,8}(x[1-9]\d{0,8}){3}", value):
            return tuple(map(int, value.split("x")))
        raise ValueError(
            f"--shape must be {SIZES_FORM}: batch, query heads, queries and head dim, such as "
            f"2x8x512x64; got {value!r}"
        )


@command(
    "cutlass-attn explain --shape 2x8x512x64 --kv-heads 2 --dtype bf16 --causal "
    '--device "RTX 4090"',
    "no kernel takes the call",
)
@click.option(
    "--shape",
    type=_Sizes(),
    required=True,
    metavar=SIZES_FORM.upper(),
    help="Batch, query heads, queries, head dim.",
)
@click.option(
    "--kv-heads", type=SIZE, help="Key and value heads; by default as many as query heads."
)
@click.option("--keys", type=SIZE, help="Keys; by default as many as queries.")
@click.option("--dtype", type=DTYPE, default="fp16", help="fp16, bf16 or fp32.")
@click.option("--causal", is_flag=True)
@click.option("--grad", is_flag=True, help="Explain the backward pass.")
@click.option("--kernel", default="auto", help="Only this kernel or variant, such as sm80.")
@click.option(
    "--device",
    help='"cpu", "cuda", "cuda:N"; a GPU elsewhere such as "RTX 4090" or "sm_89"; by default a '
    "usable GPU, else the CPU.",
)
@click.option("--table", is_flag=True, help="Print a line for each variant, with all reasons.")
@json_option
def explain(
    *,
    shape: tuple[int, int, int, int],
    kv_heads: int | None,
    keys: int | None,
    dtype: str,
    device: str | None,
    table: bool,
    json_file: str | None,
    **options: Any,
) -> int:
    """Show which kernel a call of attention() would run, and why preferred kernels cannot run."""
    batch, heads, queries, head_dim = shape
    of_keys = (batch, kv_heads or heads, keys or queries, head_dim)
    q, k, v = (_array(sizes, dtype) for sizes in (shape, of_keys, of_keys))
    found = explained(q, k, v, device=device or default_device(), **options)
    if json_file != "-":
        click.echo(found.table() if table else str(found))
    if json_file:
        rows = [{**verdict._asdict(), "variant": verdict.variant.key} for verdict in found]
        passed_over = [asdict(kernel) for kernel in found.passed_over]
        facts: dict[str, Any] = {
            "call": found.call,
            "device": found.device,
            "passed_over": passed_over,
        }
        write(document("explain", found.chosen is not None, rows, **facts), json_file)
    return 0 if found.chosen else 1


def _array(sizes: tuple[int, ...], dtype: str) -> Any:
    """A tensor without memory; without torch a numpy array, whose memory is never touched.

    Raises ValueError: the array has more bytes than an address, or no address space.
    """
    try:
        return _without_memory(sizes, dtype)
    except (RuntimeError, MemoryError) as error:
        raise ValueError(f"--shape and --keys give an array of {sizes}: {error}") from None


def _without_memory(sizes: tuple[int, ...], dtype: str) -> Any:
    try:
        import torch
    except ImportError:
        if dtype == "bfloat16":
            raise ValueError("--dtype bf16 needs torch; pip install torch") from None
        return np.empty(sizes, dtype)
    return torch.empty(sizes, dtype=getattr(torch, dtype), device="meta")
