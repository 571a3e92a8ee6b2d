"""Forgetting gates: a decay that the tokens decide."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc._contract import checks, qk_checks
from posenc._contract.sharding import replicate_like
from posenc.functional.biased import attend
from posenc.nn._module import Linear, ReadOnlyArguments, called
from posenc.numerics.tables import widest
from posenc.ops.attention.biases import RunningSum
from posenc.ops.attention.rows import relative_bias


class _Gates(Linear):
    """The map to the gates, a class because frameworks reset every layer by its method."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.bias.is_meta:
            return
        length = torch.logspace(4, 12, self.out_features, 2, dtype=torch.float64, device="cpu")
        with torch.no_grad():
            bias = -torch.expm1(1 / length).log()
            self.bias.copy_(replicate_like(self.bias, bias))


class ForgetGate(ReadOnlyArguments):
    r"""Lower each score by what the tokens in between forget.

    .. math::
        \text{bias}_{h,i,j} = \sum_{l=j+1}^{i} \ln \sigma(w_h \cdot x_l + b_h) = c_i - c_j

    The module is causal attention with this bias. It takes the embeddings :math:`x` of the keys,
    or the running sum :math:`c` that :meth:`sums` makes of them. Far keys are pruned where they
    provably do not count, as with ALiBi.

    Args:
        num_heads: Query heads ``H``.
        embed_dim: Channels ``E`` of the embeddings.
        dtype: The dtype of the parameters, torch's default if None.

    Attributes:
        proj: The linear map to the gates, with ``weight`` and ``bias``. At the start an average
            token keeps :math:`e^{-1/T}`, with :math:`T` from 16 tokens in the first head to 4096
            in the last.

    Examples:
        >>> gate = ForgetGate(embed_dim=512, num_heads=8)
        >>> x = torch.randn(1, 100, 512)
        >>> q, k, v = torch.randn(3, 1, 8, 100, 64).unbind()
        >>> gate(q, k, v, x).shape
        torch.Size([1, 8, 100, 64])

        A cache of keys has their sums too:

        >>> sums = gate.sums(x)
        >>> sums = gate.sums(torch.randn(1, 1, 512), past=sums)
        >>> k, v = torch.randn(2, 1, 8, 101, 64).unbind()
        >>> gate(q[:, :, :1], k, v, sums=sums).shape
        torch.Size([1, 8, 1, 64])

    References:
        Lin et al., *Forgetting Transformer: Softmax Attention with a Forget Gate*, 2025.
    """

    def __init__(self, num_heads: int, *, embed_dim: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        who = type(self).__name__
        self.embed_dim = checks.integer(who, "embed_dim", embed_dim)
        self.num_heads = checks.integer(who, "num_heads", num_heads)
        self.dtype = checks.optional(checks.float_dtype, who, "dtype", dtype)
        self.proj = _Gates(self.embed_dim, self.num_heads, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw the weight as :class:`torch.nn.Linear` does, and set the bias to long memories."""
        self.proj.reset_parameters()

    def sums(self, x: Tensor, *, past: Tensor | None = None) -> Tensor:
        """The running sum of the logarithms of the gates.

        Args:
            x: Embeddings ``(L, E)`` or ``(B, L, E)``.
            past: Sums ``(H, P)`` or ``(B, H, P)`` of the tokens before, as returned for them. The
                last of them is enough for a cache of your own.

        Returns:
            ``(H, P + L)`` or ``(B, H, P + L)``: those of ``past``, then those of ``x``. They are
            float64, or float32 on Apple's GPUs.
        """
        who = type(self).__name__
        _, width = checks.check_embeddings(who, "x", x)
        hint = f"Build {who}({self.num_heads}, embed_dim={width})."
        checks.equal(who, "embed_dim", width, self.embed_dim, hint)
        logits = self.proj(x).mT.to(widest(x.device))
        sums = torch.nn.functional.logsigmoid(logits).cumsum(-1)
        if past is None:
            return sums
        checks.float_tensor(who, "past", past)
        if past.shape[:-1] != sums.shape[:-1] or past.shape[-1] == 0:
            shape = ", ".join(map(str, (*sums.shape[:-1], "P")))
            rule = f"past must have shape ({shape}), with P at least 1"
            hint = "Pass None before the first token."
            checks.fail(who, rule, f"shape {tuple(past.shape)}", hint)
        past = past.to(sums.dtype)
        return torch.cat((past, past[..., -1:] + sums), -1)

    def bias(
        self,
        sums: Tensor,
        q_len: int | None = None,
        *,
        query_offset: int | Tensor | None = None,
        document_ids: Tensor | None = None,
        window: int | tuple[int, int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """The whole matrix, ``(H, Q, K)`` or ``(B, H, Q, K)``; ``-inf`` for keys not seen.

        ``sums`` are what :meth:`sums` returned for the ``K`` keys, and ``q_len`` is ``K`` if None.
        Other arguments are those of :func:`posenc.attention.relative_bias`.
        """
        who = type(self).__name__
        checks.float_tensor(who, "sums", sums)
        checks.rank(who, "sums", sums, (2, 3), "(H, K) or (B, H, K)")
        keys = sums.shape[-1]
        return relative_bias(
            RunningSum(sums),
            keys if q_len is None else q_len,
            keys,
            query_offset=query_offset,
            document_ids=document_ids,
            window=window,
            dtype=dtype,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor | None = None,
        *,
        sums: Tensor | None = None,
        scale: float | None = None,
        query_offset: int | Tensor | None = None,
        document_ids: Tensor | None = None,
        window: int | tuple[int, int] | None = None,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        prune: bool = True,
        backend: str | None = None,
    ) -> Tensor:
        """Attention with these gates, without a matrix of scores.

        Arguments are those of :func:`posenc.attention.biased_attention`, and either ``x``, the
        embeddings ``(K, E)`` or ``(B, K, E)`` of the tokens of the keys, or ``sums``, what
        :meth:`sums` returned for them. Gradients reach the gates, also through ``sums``.
        """
        who = type(self).__name__
        if (x is None) == (sums is None):
            got = "neither" if x is None else "both"
            hint = "Pass x of all keys, or sums if some of them are in a cache."
            checks.fail(who, "pass either x or sums", got, hint)
        if sums is None:
            qk_checks.check_qk(who, q, k)
            sums = self.sums(x)  # type: ignore[arg-type]
            if sums.shape[-1] != k.shape[2]:
                rule = f"x must have the {k.shape[2]} tokens of the keys"
                checks.fail(who, rule, sums.shape[-1], "For keys in a cache, pass sums of all.")
        out, _ = attend(
            who,
            q,
            k,
            v,
            RunningSum(sums),
            scale=scale,
            query_offset=query_offset,
            document_ids=document_ids,
            window=window,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            prune=prune,
            backend=backend,
        )
        return out

    attention = called(forward)
