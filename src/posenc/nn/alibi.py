"""Attention with linear biases (ALiBi)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posenc import attention, configs, kernels
from posenc._contract import checks, qk_checks
from posenc.functional.alibi import alibi_bias, alibi_key_bias, alibi_slopes
from posenc.functional.conventions import alibi_model_slopes
from posenc.nn._tables import Numbers, SharedTables, TableModule
from posenc.numerics.tables import widest

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from posenc.attention.mods import MaskMod, ScoreMod


@dataclass(frozen=True, slots=True)
class Slopes:
    """The slopes of each head: those of a formula, or numbers, in one sequence or in several."""

    heads: int
    bias_max: float
    plain: bool
    numbers: tuple[float, ...] | tuple[tuple[float, ...], ...] | None

    def __call__(self, rows: int, device: torch.device, dtype: torch.dtype) -> Numbers:
        """The slopes, in the widest dtype of the device; they have no rows."""
        dtype = widest(device)
        if self.numbers is not None:
            exact = torch.tensor(self.numbers, dtype=torch.float64, device="cpu")
            return (exact.to(dtype).to(device),)
        slopes = alibi_slopes(
            self.heads, bias_max=self.bias_max, plain=self.plain, device=device, dtype=dtype
        )
        return (slopes,)


class ALiBi(TableModule):
    """Lower each attention score in proportion to the distance it spans.

    It holds ``H`` numbers. :meth:`attention` is the whole of it in one call; the other methods
    give the bias in the form that an attention of your own takes. ``docs/alibi.md`` is the manual.

    Args:
        num_heads: Heads ``H``.
        causal: Whether a query sees only keys up to its own position.
        bias_max: The last head's slope is ``2**-bias_max``.
        plain: Slopes ``2**(-bias_max * h / H)`` for every ``H``, also where the paper's code
            takes others (``H`` not a power of two).
        slopes: Slopes of your own, ``(H,)`` or ``(B, H)``, instead. Zero is a head that sees no
            distance, and is never windowed; below zero is refused.

    Attributes:
        slopes: float32 of shape ``(H,)`` or ``(B, H)``, in the paper's head order: what
            flash-attn takes as ``alibi_slopes``. They stay as they were made; those that learn are
            an argument of :func:`posenc.attention.alibi_attention`.

    Examples:
        >>> alibi = ALiBi(num_heads=8)
        >>> alibi.get_bias(16).shape
        torch.Size([8, 16, 16])
        >>> alibi.get_bias(3)[0]
        tensor([[ 0.0000,    -inf,    -inf],
                [-0.5000,  0.0000,    -inf],
                [-1.0000, -0.5000,  0.0000]])

    References:
        Press et al., *Train Short, Test Long*, 2022.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        causal: bool = True,
        bias_max: float = 8.0,
        plain: bool = False,
        slopes: Tensor | Sequence[Any] | None = None,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        self.num_heads = checks.integer(who, "num_heads", num_heads)
        self.causal = checks.boolean(who, "causal", causal)
        self.bias_max = checks.positive_float(who, "bias_max", bias_max)
        self.plain = checks.boolean(who, "plain", plain)
        numbers = None if slopes is None else _as_numbers(who, slopes, self.num_heads)
        table = Slopes(self.num_heads, self.bias_max, self.plain, numbers)
        self._tables: SharedTables[Slopes] = SharedTables(
            table, 1, widest(torch.get_default_device())
        )

    @property
    def slopes(self) -> Tensor:
        """For the kernels of others, in float32; the bias itself is made of exact ones."""
        return self._exact(self._tables.device).to(torch.float32, copy=True)

    @classmethod
    def like(
        cls, model: str, num_heads: int, *, head_dim: int | None = None, bias_max: float = 8.0
    ) -> ALiBi:
        """ALiBi as ``bloom``, ``mpt`` or ``falcon`` has it; see :func:`alibi_model_slopes`.

        Examples:
            >>> ALiBi.like("falcon", 2, head_dim=64).slopes
            tensor([0.0078, 0.0005])
        """
        slopes = alibi_model_slopes(model, num_heads, head_dim=head_dim, bias_max=bias_max)
        return cls(num_heads, slopes=slopes)

    @classmethod
    def from_config(cls, config: dict[str, Any] | str | Path | Any, **keywords: Any) -> ALiBi:
        """The biases of a model, from its Hugging Face config: BLOOM's, MPT's or Falcon's.

        A model that has other positions is refused by name. `posenc explain config.json` shows
        what was read from which key.

        Args:
            config: A dict, the path of a ``config.json`` or of a model's folder, or a config
                object of transformers.
            **keywords: Arguments of the constructor, which then win over the config.

        Examples:
            >>> ALiBi.from_config({"model_type": "bloom", "n_head": 2}).slopes
            tensor([0.0625, 0.0039])
            >>> falcon = {"model_type": "falcon", "alibi": True, "hidden_size": 128}
            >>> ALiBi.from_config({**falcon, "num_attention_heads": 2}).slopes
            tensor([0.0078, 0.0005])
        """
        found = configs.read_alibi(config)
        made: dict[str, Any] = {"num_heads": found.num_heads, "bias_max": found.bias_max}
        made.update(keywords)
        if found.model == "falcon" and "slopes" not in made:
            heads, width = made["num_heads"], found.head_dim
            made["slopes"] = alibi_model_slopes(found.model, heads, head_dim=width)
        return cls(**made)

    def heads(self, start: int, stop: int) -> ALiBi:
        """The heads from ``start`` up to ``stop``, for a rank that has no others.

        Examples:
            >>> ALiBi(8).heads(2, 4).slopes
            tensor([0.1250, 0.0625])
        """
        who = type(self).__name__
        first = checks.integer(who, "start", start, least=0)
        last = checks.integer(who, "stop", stop)
        if not first < last <= self.num_heads:
            rule = f"heads must be at least one of the {self.num_heads} there are"
            got, way_out = f"{first} up to {last}", "Give the first, and one past the last."
            raise ValueError(checks.message(who, rule, got, way_out))
        (exact,) = self._tables.description(1, torch.device("cpu"), torch.float64)
        slopes = exact[..., first:last]
        part = type(self)(last - first, causal=self.causal, slopes=slopes)
        return part.to(self._tables.device)

    def _exact(self, device: torch.device | str | None) -> Tensor:
        where = self._tables.device if device is None else torch.device(device)
        kept = self._tables.read(torch.empty(0, device=where), torch.float64)
        (slopes,) = self._tables.description(1, where, torch.float64) if kept is None else kept
        return slopes

    def get_bias(self, seq_len: int) -> Tensor:
        """Bias for ``seq_len`` queries and keys, float32 of shape ``(H, L, L)``."""
        length = checks.integer(type(self).__name__, "seq_len", seq_len, least=0)
        return alibi_bias(self._exact(None), length, causal=self.causal)

    def bias(
        self,
        q_len: int,
        k_len: int | None = None,
        *,
        offset: int | Tensor | None = None,
        position_ids: Tensor | None = None,
        documents: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """The whole bias, ``(H, Q, K)`` or ``(B, H, Q, K)``: an ``attn_mask`` for SDPA.

        See :func:`posenc.functional.alibi_bias` for the arguments.
        """
        return alibi_bias(
            self._exact(device),
            q_len,
            k_len,
            causal=self.causal,
            offset=offset,
            position_ids=position_ids,
            documents=documents,
            dtype=dtype,
        )

    def key_bias(
        self,
        k_len: int,
        *,
        position_ids: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """The bias without its row terms, ``(H, 1, K)``, to go with a causal mask.

        See :func:`posenc.functional.alibi_key_bias`.
        """
        if not self.causal:
            rule = "a bias of keys alone is right only under a causal softmax"
            way_out = "Use bias(), which has the absolute distance."
            who = type(self).__name__
            raise ValueError(checks.message(who, rule, "causal=False", way_out))
        return alibi_key_bias(self._exact(device), k_len, position_ids=position_ids, dtype=dtype)

    def score_mod(
        self,
        *,
        offset: int | Tensor = 0,
        position_ids: Tensor | None = None,
        documents: Tensor | None = None,
        head_offset: int = 0,
        masked: bool = True,
        base: ScoreMod | None = None,
    ) -> ScoreMod:
        """For ``flex_attention``; see :func:`posenc.attention.alibi_score_mod`."""
        return attention.alibi_score_mod(
            self.slopes,
            causal=self.causal,
            offset=offset,
            position_ids=position_ids,
            documents=documents,
            head_offset=head_offset,
            masked=masked,
            base=base,
        )

    def mask_mod(
        self,
        *,
        offset: int | Tensor = 0,
        documents: Tensor | None = None,
        base: MaskMod | None = None,
    ) -> MaskMod:
        """For ``create_block_mask``; see :func:`posenc.attention.alibi_mask_mod`."""
        return attention.alibi_mask_mod(
            causal=self.causal,
            offset=offset,
            documents=documents,
            device=self._tables.device,
            base=base,
        )

    def block_mask(
        self,
        q_len: int,
        k_len: int | None = None,
        *,
        score_bound: float | Tensor,
        dtype: torch.dtype,
        offset: int | Tensor | None = None,
        documents: Tensor | None = None,
    ) -> BlockMask:
        """For ``flex_attention``, without far keys; see :func:`posenc.attention.alibi_block_mask`.

        Examples:
            >>> mask = ALiBi(8).block_mask(4096, score_bound=8.0, dtype=torch.bfloat16)
            >>> mask.shape
            (1, 8, 4096, 4096)
        """
        return attention.alibi_block_mask(
            self.slopes,
            q_len,
            k_len,
            score_bound=score_bound,
            dtype=dtype,
            causal=self.causal,
            offset=offset,
            documents=documents,
        )

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        offset: int | Tensor | None = None,
        documents: Tensor | None = None,
        windows: bool = True,
        score_bound: float | Tensor | None = None,
        path: str | None = None,
    ) -> Tensor:
        """Attention with this bias, without far keys: :func:`posenc.attention.alibi_attention`.

        Padding and packing are ``documents``; a mask of any other kind is for FlexAttention, with
        :meth:`score_mod`.

        Args:
            q: ``(B, H, Q, D)``.
            k: ``(B, Hk, K, D)``.
            v: ``(B, Hk, K, Dv)``.
            scale: Of the scores; ``1 / sqrt(D)`` if None.
            offset: Key of the first query; ``K - Q`` if None.
            documents: Ids ``(K,)`` or ``(B, K)`` of texts: queries see their own. Negative ones are
                padding.
            windows: Whether to leave far keys out.
            score_bound: Take the windows from this bound on the scores instead of the data.
            path: ``flex`` or ``chunked`` to insist on one.

        Returns:
            ``(B, H, Q, Dv)`` in the dtype of ``q``.

        Examples:
            >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
            >>> ALiBi(8).attention(q, k, v).shape
            torch.Size([1, 8, 512, 64])
        """
        slopes = self._exact(q.device if isinstance(q, Tensor) else None)
        return attention.alibi_attention(
            q,
            k,
            v,
            slopes,
            causal=self.causal,
            scale=scale,
            offset=offset,
            documents=documents,
            windows=windows,
            score_bound=score_bound,
            path=path,
        )

    def forward(self, scores: Tensor) -> Tensor:
        """Add the bias to attention scores.

        Args:
            scores: Floating tensor of shape ``(..., H, Q, K)``; the last query is at the last key.

        Returns:
            A new tensor with the shape and dtype of ``scores``.
        """
        who = type(self).__name__
        checks.float_tensor(who, "scores", scores)
        if scores.dim() < 3 or scores.shape[-3] != self.num_heads:
            rule = f"scores must have shape (..., {self.num_heads}, Q, K)"
            got = f"shape {tuple(scores.shape)}"
            raise ValueError(checks.message(who, rule, got, "Put the heads third from last."))
        queries, keys = scores.shape[-2:]
        if keys < queries:
            rule = f"scores must have at least as many keys as queries, {queries}"
            raise ValueError(checks.message(who, rule, keys, "Queries are the last of the keys."))
        wide = torch.promote_types(scores.dtype, torch.float32)
        slopes = self._exact(scores.device)
        if slopes.dim() == 2 and len(slopes) == 1:
            slopes = slopes[0]
        if slopes.dim() == 2 and (scores.dim() < 4 or scores.shape[-4] != len(slopes)):
            rule = f"scores must have shape ({len(slopes)}, {self.num_heads}, Q, K)"
            got = f"shape {tuple(scores.shape)}"
            raise ValueError(checks.message(who, rule, got, "Each sequence has its own slopes."))
        bias = alibi_bias(slopes, queries, keys, causal=self.causal, dtype=wide)
        return kernels.add(scores, bias)

    def _given(self, names: Iterable[str]) -> dict[str, Any]:
        return {**super()._given(names), "slopes": self._tables.description.numbers}


def _as_numbers(who: str, slopes: Any, heads: int) -> Any:
    """Slopes of the caller's as numbers, ``(H,)`` or ``(B, H)``."""
    if isinstance(slopes, Tensor) and slopes.requires_grad:
        rule = "slopes must not require a gradient, because their numbers are kept"
        way_out = "Those that learn go to posenc.attention.alibi_attention(q, k, v, slopes)."
        raise ValueError(checks.message(who, rule, f"shape {tuple(slopes.shape)}", way_out))
    try:
        found = torch.as_tensor(slopes, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError):
        rule, got = "slopes must be numbers", checks.describe(slopes)
        raise TypeError(checks.message(who, rule, got, "Pass one for each head.")) from None
    qk_checks.slopes(who, found)
    if found.shape[-1] != heads:
        rule = f"slopes must have one number for each of the {heads} heads"
        got = f"shape {tuple(found.shape)}"
        raise ValueError(checks.message(who, rule, got, "Give (H,) or (B, H)."))
    if not bool(((found >= 0) & found.isfinite()).all()):
        rule = "slopes must be finite and not below zero"
        way_out = "A slope lowers far keys; zero leaves a head without distance."
        raise ValueError(checks.message(who, rule, found.tolist(), way_out))
    return tuple(map(tuple, found.tolist())) if found.dim() == 2 else tuple(found.tolist())
