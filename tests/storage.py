"""How tensors of a case lie in memory: the same values, at strides and addresses of many kinds.

What lies between them is NaN, so that it shows what a kernel reads beyond its operands.
"""


def _sliced(dense):
    """Parts of larger tensors of NaN: what a kernel reads beyond its operands shows."""
    result = []
    for x in dense:
        b, h, s, d = x.shape
        store = x.new_full((b, h + 1, s + 3, d + 24), float("nan"))
        result.append(store[:, :h, 1 : s + 1, 8 : d + 8].copy_(x))
    return result


def _packed(dense):
    """Slots of one tensor; rows of the longest operand, the rest of the shorter ones' is NaN."""
    rows = max(x.shape[2] for x in dense)
    b, h, _, d = dense[0].shape
    store = dense[0].new_full((b, rows, len(dense), h, d), float("nan"))
    slots = store.permute(2, 0, 3, 1, 4)
    return [slots[i, :, :, : x.shape[2]].copy_(x) for i, x in enumerate(dense)]


def _unaligned(dense):
    result = []
    for x in dense:
        store = x.new_full((*x.shape[:3], x.shape[3] + 1), float("nan"))
        result.append(store[..., 1:].copy_(x))
    return result


def _shifted(dense):
    result = []
    for x in dense:
        store = x.new_full((*x.shape[:3], x.shape[3] + 8), float("nan"))
        result.append(store[..., 1 : x.shape[3] + 1].copy_(x))
    return result


OPERANDS = {
    "dense": lambda dense: dense,
    "transposed": lambda dense: [x.transpose(1, 2).contiguous().transpose(1, 2) for x in dense],
    "sliced": _sliced,
    "packed": _packed,
    "unaligned": _unaligned,
    "shifted": _shifted,
}


def _logits_sliced(x):
    """Part of a larger tensor of NaN (of a mask: True), every other key of it."""
    store = x.new_full([*(n + 2 for n in x.shape[:-1]), 2 * x.shape[-1] + 3], float("nan"))
    return store[(*(slice(1, n + 1) for n in x.shape[:-1]), slice(2, -1, 2))].copy_(x)


def _logits_unaligned(x):
    store = x.new_full([*x.shape[:-1], x.shape[-1] + 1], float("nan"))
    return store[..., 1:].copy_(x)


LOGITS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "sliced": _logits_sliced,
    "unaligned": _logits_unaligned,
}
