"""Checks that all ranks make the same call; otherwise all raise an error that names the ranks.

If only one rank raised, the others would wait forever in their next collective.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ._collectives import all_gather

_KINDS = (TypeError, ValueError, NotImplementedError, RuntimeError)
_ERRORS = {kind.__name__: kind for kind in _KINDS}


def agree(
    groups: Sequence[Any], device: torch.device, fields: dict[str, Any], error: Exception | None
) -> None:
    """Compares `fields` with those of the other ranks.

    Args:
        groups: the process groups that this rank is a member of; together they reach all ranks.
        device: the device of tensors for collectives of the groups.
        fields: names and values that must be equal on all ranks.
        error: the error of this rank's own call, if it has one.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: on every rank, with each rank's
            error.
    """
    checksum = zlib.crc32(repr(sorted(fields.items())).encode())
    row = torch.tensor([error is not None, checksum], dtype=torch.int64, device=device)
    for group in groups:
        rows, work = all_gather(row, group)
        work.wait()
        row[0] = (rows[:, 0] != 0).any() | (rows[:, 1] != row[1]).any()
    if not int(row[0]):
        return
    said = [(dist.get_rank(), fields, type(error).__name__, "" if error is None else str(error))]
    for group in groups:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, said, group=group)
        said = [entry for entries in gathered for entry in entries]
    raise _named(said)


def _named(said: list[tuple[int, dict[str, Any], str, str]]) -> Exception:
    """One error for the errors of all ranks."""
    if failed := [(rank, kind, text) for rank, _, kind, text in said if text]:
        kind = _ERRORS.get(failed[0][1], ValueError)
        return kind("; ".join(f"rank {rank}: {text}" for rank, _, text in failed))
    first, due, _, _ = said[0]
    differences = [
        f"{name} is {due.get(name)} on rank {first} and {given.get(name)} on rank {rank}"
        for rank, given, _, _ in said[1:]
        for name in dict.fromkeys((*due, *given))
        if given.get(name) != due.get(name)
    ]
    return ValueError("all ranks must make the same call: " + "; ".join(differences))
