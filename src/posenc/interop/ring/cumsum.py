"""The running sum over a sequence that is sharded over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posenc._contract import checks
from posenc.interop.ring.exchange import Ranks, check_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def sharded_cumsum(x: Tensor, *, group: ProcessGroup | None = None, zigzag: bool = False) -> Tensor:
    r"""The running sum of a whole sequence, at this rank's tokens.

    .. math:: c_t = \sum_{u \le t} x_u

    It is summed in float64. Only the sums of the ranks' chunks travel, in either pass.

    Args:
        x: ``(..., n)``: one number for each of this rank's tokens, as many on every rank.
        group: The ranks that share the sequence, in its order; all ranks if None.
        zigzag: Whether the tokens are those of
            ``posenc.positions.context_parallel(..., zigzag=True)``.

    Returns:
        float64 of the shape of ``x``, as :class:`posenc.attention.RunningSum` takes it.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> sharded_cumsum(torch.tensor([1.0, 2.0, 3.0]))
        tensor([1., 3., 6.], dtype=torch.float64)
        >>> dist.destroy_process_group()
    """
    who = "sharded_cumsum"
    checks.float_tensor(who, "x", x)
    checks.boolean(who, "zigzag", zigzag)
    if x.dim() == 0 or (zigzag and x.shape[-1] % 2):
        rule = "x must have a last axis of tokens, an even number if zigzag"
        checks.fail(who, rule, f"shape {tuple(x.shape)}", "Pad the sequence.")
    made: Tensor = _Cumsum.apply(x.double(), check_ranks(who, group), zigzag)
    return made


class _Cumsum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, zigzag: bool) -> Tensor:
        ctx.given = ranks, zigzag
        return _sum(x, ranks, zigzag, backwards=False)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return _sum(g, *ctx.given, backwards=True), None, None


def _sum(x: Tensor, ranks: Ranks, zigzag: bool, *, backwards: bool) -> Tensor:
    """The sums up to each token, or from each token on."""
    chunks = x.unflatten(-1, (2 if zigzag else 1, -1))
    totals = ranks.gather(chunks.sum(-1), zigzag=zigzag)
    mine = [ranks.rank, 2 * ranks.world - 1 - ranks.rank][: chunks.shape[-2]]
    if backwards:
        chunks, totals = chunks.flip(-1), totals.flip(-1)
        mine = [totals.shape[-1] - 1 - chunk for chunk in mine]
    before = torch.nn.functional.pad(totals.cumsum(-1)[..., :-1], (1, 0))[..., mine]
    sums = chunks.cumsum(-1) + before[..., None]
    return torch.flatten(sums.flip(-1) if backwards else sums, -2)
