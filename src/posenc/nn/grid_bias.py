"""The bias of a window of an image: a learned number for each step in rows and columns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posenc._contract import checks
from posenc.nn._bias import RelativeBias
from posenc.nn._module import Linear
from posenc.numerics.tables import widest
from posenc.ops.attention.biases import RowBias

if TYPE_CHECKING:
    from posenc.functional.mods import ScoreMod

Size = tuple[int, int]


def _check_size(who: str, name: str, size: Any) -> Size:
    sides = size if isinstance(size, (tuple, list)) else (size, size)
    if len(sides) != 2:
        rule = f"{name} must be one side, or rows and columns"
        checks.fail(who, rule, checks.describe(size), f"Pass {name}=(7, 7), for example.")
    rows, columns = (checks.integer(who, name, side) for side in sides)
    return rows, columns


def _geometric_weights(old: int, new: int) -> Tensor:
    """How much of each number of a side of ``old`` cells goes into each of ``new``, float64.

    The numbers lie at distances whose steps grow by a ratio, so that they reach over the new side,
    and are read at whole distances: linearly between them, the last one beyond them.
    """
    low, high = 1.01, 1.5
    # Halved this often, the two are neighbours in float64.
    for _ in range(52):
        ratio = (low + high) / 2
        far = sum(ratio**n for n in range(old - 1)) > new - 1
        low, high = (low, ratio) if far else (ratio, high)
    steps = torch.tensor([high**n for n in range(old - 1)], dtype=torch.float64, device="cpu")
    distance = torch.cat((-steps.cumsum(0).flip(0), steps.new_zeros(1), steps.cumsum(0)))
    wanted = torch.arange(1 - new, new, device="cpu").to(distance)
    right = torch.searchsorted(distance, wanted).clamp(max=2 * old - 2)
    left = (right - 1).clamp(min=0)
    # Steps are at least one, unless there is none.
    share = (wanted - distance[left]) / (distance[right] - distance[left]).clamp(min=1)
    each = torch.eye(2 * old - 1, dtype=torch.float64, device="cpu")
    return torch.lerp(each[left], each[right], share.clamp(0, 1)[:, None])


class GridBias(RelativeBias):
    r"""Add a learned number for the steps in rows and columns between two cells of a window.

    .. math:: \text{bias}_{h,i,j} = t_{y_i - y_j,\ x_i - x_j,\ h}

    Tokens are the cells of the window, row by row, and every token sees every other. This is the
    bias of Swin; with a prefix of one token that of BEiT; and if continuous that of Swin v2, whose
    table is computed from the steps :math:`\Delta`, by a network with one hidden layer and ReLU:

    .. math::
        t = 16\,\sigma(f(g(\Delta y), g(\Delta x))), \qquad
        g(\Delta) = \frac{\text{sign}(\Delta)}{3} \log_2\!\left(1 + \frac{8|\Delta|}{n - 1}\right)

    for :math:`n` rows, or columns, of the window of the pretraining.

    Args:
        size: Rows and columns ``(h, w)``, or one number for both.
        num_heads: Query heads ``H``.
        prefix: Tokens before the cells, such as the class token of BEiT. They have three numbers:
            as queries of cells, as keys of cells, and among themselves.
        continuous: Whether the table is computed, as in Swin v2.
        hidden: Width of the hidden layer, if continuous.
        pretrained_size: The window of the pretraining, if continuous; ``size`` if None.
        dtype: The dtype of the parameters, torch's default if None.

    Attributes:
        relative_position_bias_table: Unless continuous, a Parameter of shape
            ``((2h - 1)(2w - 1), num_heads)``, with three rows more if there is a prefix; zero at
            the start. It has Swin's and BEiT's name and order.
        continuous_position_bias_mlp: If continuous, the network, with the names of Swin v2 in
            transformers.

    Examples:
        >>> bias = GridBias(7, num_heads=4)
        >>> q, k, v = torch.randn(3, 64, 4, 49, 32).unbind()  # 64 windows
        >>> bias.attention(q, k, v).shape
        torch.Size([64, 4, 49, 32])
        >>> bias.resize(12).bias().shape
        torch.Size([4, 144, 144])

    References:
        Liu et al., *Swin Transformer*, 2021, section 3.2; Bao et al., *BEiT*, 2022; Liu et al.,
        *Swin Transformer V2*, 2022, section 3.3.
    """

    def __init__(
        self,
        size: int | Size,
        *,
        num_heads: int,
        prefix: int = 0,
        continuous: bool = False,
        hidden: int = 512,
        pretrained_size: int | Size | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, causal=False, dtype=dtype)
        who = type(self).__name__
        self.size = rows, columns = _check_size(who, "size", size)
        self.prefix = checks.integer(who, "prefix", prefix, least=0)
        self.continuous = checks.boolean(who, "continuous", continuous)
        self.hidden = checks.integer(who, "hidden", hidden)
        self.pretrained_size = checks.optional(_check_size, who, "pretrained_size", pretrained_size)
        if continuous and prefix:
            rule = "prefix must be 0 if continuous, because those tokens are no step away"
            checks.fail(who, rule, prefix, "Pass continuous=False.")
        if continuous:
            first = Linear(2, self.hidden, dtype=dtype)
            last = Linear(self.hidden, self.num_heads, bias=False, dtype=dtype)
            self.continuous_position_bias_mlp = nn.Sequential(first, nn.ReLU(), last)
        else:
            entries = (2 * rows - 1) * (2 * columns - 1) + (3 if prefix else 0)
            self.relative_position_bias_table = nn.Parameter(
                torch.empty(entries, self.num_heads, dtype=dtype)
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set a table to zero; draw a network as :class:`torch.nn.Linear` does."""
        if not self.continuous:
            nn.init.zeros_(self.relative_position_bias_table)
            return
        for layer in (self.continuous_position_bias_mlp[0], self.continuous_position_bias_mlp[2]):
            layer.reset_parameters()  # type: ignore[operator]

    @property
    def tokens(self) -> int:
        """Tokens of a window, the prefix included."""
        tokens: int = self.prefix + self.size[0] * self.size[1]
        return tokens

    def _as_bias(self, keys: int, dtype: torch.dtype, device: torch.device) -> RowBias:
        hint = f"Call resize() for another window than {self.size}."
        checks.equal(type(self).__name__, "k_len", keys, self.tokens, hint)
        steps = self._steps(dtype, device) if self.continuous else self.relative_position_bias_table
        entries = steps.to(dtype)

        def rows(query_index: Tensor, key_index: Tensor) -> Tensor:
            # The gradient of indexing may depend on the order of threads.
            entry = self._entry(query_index[..., None], key_index)
            return nn.functional.embedding(entry, entries).movedim(-1, 1)

        return RowBias(rows)

    def _entry(self, query: Tensor, key: Tensor) -> Tensor:
        """The row of the table for a query and a key."""
        height, width = self.size
        i, j = query - self.prefix, key - self.prefix
        down = i.div(width, rounding_mode="floor") - j.div(width, rounding_mode="floor")
        right = i.remainder(width) - j.remainder(width)
        entry = (down + height - 1) * (2 * width - 1) + right + width - 1
        if not self.prefix:
            return entry
        last = (2 * height - 1) * (2 * width - 1) + 2
        entry = entry.masked_fill(i < 0, last - 2).masked_fill(j < 0, last - 1)
        return entry.masked_fill((i < 0) & (j < 0), last)

    def _steps(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The computed table of Swin v2."""
        sides = []
        for side, before in zip(self.size, self.pretrained_size or self.size, strict=True):
            steps = torch.arange(1 - side, side, device=device).to(widest(device))
            far = (8 * steps.abs() / max(before - 1, 1) + 1).log2() / math.log2(8)
            sides.append(far * steps.sign())
        pairs = torch.stack(torch.meshgrid(*sides, indexing="ij"), -1).flatten(0, 1)
        numbers: Tensor = self.continuous_position_bias_mlp(pairs.to(dtype))
        return 16 * numbers.sigmoid()

    def bias(
        self,
        q_len: int | None = None,
        k_len: int | None = None,
        *,
        query_offset: int | Tensor | None = None,
        document_ids: Tensor | None = None,
        window: int | tuple[int, int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """The whole matrix ``(H, N, N)`` of a window, as ``attn_mask`` of SDPA.

        ``q_len`` and ``k_len`` are all ``N`` tokens if None. Other arguments are those of
        :func:`posenc.attention.relative_bias`.
        """
        return super().bias(
            self.tokens if q_len is None else q_len,
            self.tokens if k_len is None else k_len,
            query_offset=query_offset,
            document_ids=document_ids,
            window=window,
            dtype=dtype,
        )

    def score_mod(
        self,
        q_len: int,
        k_len: int | None = None,
        *,
        query_offset: int | Tensor | None = None,
        document_ids: Tensor | None = None,
        window: int | tuple[int, int] | None = None,
        masked: bool = True,
        base: ScoreMod | None = None,
    ) -> ScoreMod:
        """A score_mod for ``flex_attention``, which reads the matrix of a window.

        Arguments are those of :func:`posenc.attention.relative_score_mod`; other documents and
        keys outside the window are always hidden.
        """
        matrix = self.bias(
            q_len,
            k_len,
            query_offset=query_offset,
            document_ids=document_ids,
            window=window,
        )

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if base is not None:
                score = base(score, b, h, q, k)
            read = matrix[h, q, k] if matrix.dim() == 3 else matrix[b, h, q, k]
            return score + read.to(score.dtype)

        return score_mod

    def resize(self, size: int | Size, *, mode: str = "bicubic") -> GridBias:
        r"""A new module for windows of another size, with these parameters.

        A table is interpolated; what belongs to the prefix is copied. The network of a
        continuous bias is copied, and measures steps by the window of the pretraining.

        Which way belongs to the model that goes on from the table. ``bicubic`` and ``bilinear``
        stretch the old window over the new one. ``geometric`` keeps the numbers of near cells near
        and stretches the far ones: those at a distance of :math:`n` cells are put at

        .. math:: 1 + r + \dots + r^{n-1}, \qquad 1.01 \le r \le 1.5

        with :math:`r` such that the farthest is that of the new window, and read linearly.

        Args:
            size: Rows and columns, or one number for both.
            mode: ``bicubic``, as Swin's own code fine-tunes at another size; ``bilinear``, as BEiT
                in transformers; or ``geometric``, as timm loads Swin, BEiT, MaxViT and others.
                BEiT's own code has a cubic spline through the numbers of ``geometric``.
        """
        who = f"{type(self).__name__}.resize"
        checks.choice(who, "mode", mode, ("bicubic", "bilinear", "geometric"))
        old = self.pretrained_size or self.size if self.continuous else self.pretrained_size
        other = self.replace(size=size, pretrained_size=old).to(next(self.parameters()))
        with torch.no_grad():
            if self.continuous or other.size == self.size:
                other.load_state_dict(self.state_dict())
                return other
            sides = [2 * side - 1 for side in self.size]
            table = self.relative_position_bias_table.to(widest(self._device()))
            cells = math.prod(sides)
            grid = table[:cells].T.unflatten(1, sides)
            if mode == "geometric":
                down, right = map(_geometric_weights, self.size, other.size)
                grid = down.to(grid) @ grid @ right.to(grid).T
            else:
                wanted = [2 * side - 1 for side in other.size]
                grid = nn.functional.interpolate(grid[None], wanted, mode=mode)[0]
            new = torch.cat((grid.flatten(1).T, table[cells:]))
            other.relative_position_bias_table.copy_(new)
        return other
