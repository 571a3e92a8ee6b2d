"""Attention over a sequence that is sharded over ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from posenc._contract import checks, qk_checks, sharding
from posenc.attention import biased
from posenc.attention.biases import Bias, RowBias, check_bias, stored
from posenc.attention.pruning import longest_key, score_gap
from posenc.interop.ring.blocks import Job, RingAttention
from posenc.interop.ring.exchange import Ranks, check_ranks
from posenc.interop.ring.plan import Plan, Reach
from posenc.numerics.slopes import window_length

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None = None,
    *,
    group: ProcessGroup | None = None,
    zigzag: bool = False,
    causal: bool = True,
    scale: float | None = None,
    document_ids: Tensor | None = None,
    prune: bool = True,
) -> Tensor:
    r"""As :func:`posenc.attention.biased_attention`, with a part of the sequence on each rank.

    Every rank calls it with its own part, and gets the output of its own queries: that of one
    process with the whole sequence, within rounding. Keys and values go from rank to rank while
    others are computed on, and only to ranks whose queries see them: earlier ones if ``causal``,
    those of the same document, and with ``prune`` those near enough to count, head by head. No rank
    holds the keys of more than three ranks at a time.

    The backward pass sends keys again and their gradients back, so every rank must run it. Slopes
    and tables get the gradient of this rank's queries, as all other parameters of a model do:
    sum it over the ranks with the rest.

    Args:
        q: ``(B, H, n, D)``: the queries of this rank's ``n`` tokens, as many on every rank.
        k: ``(B, Hk, n, D)`` with ``H`` a multiple of ``Hk``.
        v: ``(B, Hk, n, Dv)``.
        bias: :class:`Slopes` or :class:`DistanceTable`, the same on every rank; or
            :class:`RunningSum` of this rank's tokens, counted from the beginning of the whole
            sequence: :func:`sharded_cumsum` counts so.
        group: The ranks that share the sequence, in its order; all ranks if None.
        zigzag: Whether the tokens are those of
            ``posenc.positions.context_parallel(..., zigzag=True)``, which gives all ranks the same
            work if ``causal``.
        causal: Whether a query sees only keys up to its own.
        scale: Of the scores, :math:`1/\sqrt{D}` if None.
        document_ids: Ids ``(n,)`` or ``(B, n)`` of this rank's tokens. A run of equal ids in the
            whole sequence is a document, and a query sees only its own. Negative ids are padding,
            whose output is zero.
        prune: Whether to leave out far keys of :class:`Slopes` and :class:`RunningSum`, where their
            weights together are provably below the rounding of the output.

    Returns:
        ``(B, H, n, Dv)`` in the dtype of ``q``.

    Examples:
        >>> import torch.distributed as dist
        >>> from posenc.attention import Slopes
        >>> from posenc.functional import alibi_slopes
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()  # of 512 tokens on each rank
        >>> ring_attention(q, k, v, Slopes(alibi_slopes(8))).shape
        torch.Size([1, 8, 512, 64])
        >>> dist.destroy_process_group()

    References:
        Liu et al., *Ring Attention with Blockwise Transformers*, 2023.
    """
    how: Any = {"group": group, "zigzag": zigzag, "causal": causal, "scale": scale}
    return attend("ring_attention", q, k, v, bias, document_ids=document_ids, prune=prune, **how)[0]


def attend(
    who: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    *,
    group: Any = None,
    zigzag: bool = False,
    causal: bool = True,
    scale: float | None = None,
    document_ids: Tensor | None = None,
    prune: bool = True,
) -> tuple[Tensor, Tensor]:
    """Check the arguments of :func:`ring_attention`, and compute output and log-sum-exp."""
    _check_tensors(who, q, k, v, bias)
    for name, value in (("zigzag", zigzag), ("causal", causal), ("prune", prune)):
        checks.boolean(who, name, value)
    scale = qk_checks.check_scale(who, scale, q)
    tokens, device = q.shape[2], q.device
    ids = qk_checks.check_key_ids(who, "document_ids", document_ids, tokens, device)
    kind, values, zero = stored(bias, q.dtype)
    batched = {} if kind == "table" or values is None else {kind: values.flatten(1)}
    qk_checks.check_batches(who, q.shape[0], document_ids=ids, **batched)
    if zigzag and tokens % 2:
        rule = "q must have an even number of tokens if zigzag, half from either end"
        checks.fail(who, rule, tokens, "Pad the sequence to a multiple of twice the ranks.")
    ranks = check_ranks(who, group)
    _check_equal(who, ranks, q)
    if not q.shape[0] or not tokens:
        return biased.attend(who, q, k, v, bias, causal=causal)
    plan = Plan(ranks.world, tokens // 2 if zigzag else tokens, zigzag, causal, k.shape[1], Reach())
    if values is not None:
        values = values.to(device)
        values = {"slopes": values[..., None], "table": values[None]}.get(kind, values)
        if prune and kind != "table":
            with torch.no_grad():
                plan = plan._replace(reach=_find_reach(plan, ranks, q, k, kind, values, scale))
    if ids is not None:
        ids = ranks.gather(torch.atleast_2d(ids), zigzag=zigzag)
        plan = with_documents(plan, ids)
    share = q.shape[1] // k.shape[1]
    job = Job(who, plan, ranks, kind, zero, scale, prune, ids, share)
    made: tuple[Tensor, Tensor] = RingAttention.apply(q, k, v, values, job)
    return made


def _check_tensors(who: str, q: Any, k: Any, v: Any, bias: Any) -> None:
    """Refuse what no single rank can compute with."""
    for x in (q, k, v):
        if sharding.is_sharded(x):
            hint = "Pass DTensors to posenc.attention.biased_attention."
            checks.fail(who, "q, k and v must be plain tensors", "a DTensor", hint, TypeError)
    qk_checks.check_qkv(who, q, k, v)
    if k.shape[2] != q.shape[2]:
        rule = f"k must have the {q.shape[2]} tokens of q"
        checks.fail(who, rule, k.shape[2], "Pass q, k and v of this rank's tokens.")
    if isinstance(bias, RowBias):
        rule = "bias must be Slopes, DistanceTable, RunningSum or None"
        hint = "Gather the keys, and use biased_attention with query_offset."
        checks.fail(who, rule, "RowBias", hint, TypeError)
    check_bias(who, bias, q.shape[1], k.shape[2])


def _check_equal(who: str, ranks: Ranks, q: Tensor) -> None:
    """Refuse ranks with other shapes: they would wait for each other's messages."""
    mine = torch.tensor(q.shape, device=q.device)[:, None]
    found = ranks.gather(mine, zigzag=False)
    if bool((found != mine).any()):
        rule, hint = "q must have one shape", "Pad the sequence to a multiple of the ranks."
        checks.fail(who, f"{rule} on every rank", list(map(tuple, found.T.tolist())), hint)


def _find_reach(
    plan: Plan, ranks: Ranks, q: Tensor, k: Tensor, kind: str, values: Tensor, scale: float
) -> Reach:
    """How far the keys of every rank count, from the longest key of all ranks."""
    longest = torch.nan_to_num(longest_key(q, k), nan=math.inf)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=ranks.group)
    gap = score_gap(q, k, k, scale, longest).double()
    total, values = q.shape[2] * ranks.world, values.double()
    chunks = (-1, plan.size)
    if kind == "slopes":
        gaps = gap.unflatten(2, chunks).amax(-1)
        windows = window_length(values, gaps, total, q.dtype, causal=plan.causal).amax(0)
        of_keys = windows.unflatten(0, (k.shape[1], -1)).amax(1).long()
        return Reach(window=ranks.gather(of_keys, zigzag=plan.zigzag).T.tolist())
    # Each key that is left out has at most this share of the weight: eps / 8 in all.
    spare = math.log(8 * total / torch.finfo(q.dtype).eps)
    most = (gap + values + spare).unflatten(2, chunks).amax(-1)
    least = values.unflatten(2, chunks).amin(-1).expand_as(most)
    both = ranks.gather(torch.stack((most, least)), zigzag=plan.zigzag).permute(0, 3, 1, 2).cpu()
    return Reach(most=both[0], least=both[1])


def with_documents(plan: Plan, ids: Tensor) -> Plan:
    """The plan for documents; ``ids`` are those of the whole sequence, ``[1 or B, L]``."""
    ends = biased.hide_padding(ids)
    found = []
    for at in (0, plan.size - 1):
        first, last = (x[:, at :: plan.size].tolist() for x in ends if x is not None)
        found.append([list(zip(*pair, strict=True)) for pair in zip(first, last, strict=True)])
    return plan._replace(begins=found[0], ends=found[1])
