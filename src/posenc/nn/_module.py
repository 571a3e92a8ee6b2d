"""The base of all modules, and what those with learned numbers share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from posenc._contract.tracing import without_autocast

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, Self

    P = ParamSpec("P")
    R = TypeVar("R", covariant=True)

    class HasForward(Protocol[P, R]):
        """A module whose forward takes ``P`` and returns ``R``."""

        def forward(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


def called(forward: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """The method ``attention`` of a module: its call, because hooks run at a call."""

    @functools.wraps(forward, assigned=("__module__",))
    def attention(self: nn.Module, *arguments: Any, **keywords: Any) -> Tensor:
        """The same as calling the module: :meth:`forward`."""
        return self(*arguments, **keywords)  # type: ignore[no-any-return]

    return attention  # type: ignore[return-value]


Forward = TypeVar("Forward", bound=Callable[..., Any])


def with_offset(forward: Forward) -> Forward:
    """Show ``(q, k, *given, offset=0, ...)`` as it is called: ``(q, k, offset=0, *, ...)``.

    Whether an offset came by position is only known from ``given``; a wrapper would cost each call
    a frame.
    """
    signature = inspect.signature(forward)
    parameters = [
        p.replace(kind=p.POSITIONAL_OR_KEYWORD) if p.name == "offset" else p
        for p in signature.parameters.values()
        if p.kind is not p.VAR_POSITIONAL
    ]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return forward


class _SetOnce:
    """An attribute that is set once. There is no ``__get__``, so reads find the instance's own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __set__(self, module: nn.Module, value: Any) -> None:
        if module.__dict__.setdefault(self.name, value) != value:
            problem = f"{type(module).__name__}: {self.name} is read-only once the module is built."
            hint = f"Call module.replace({self.name}=...) for a new module."
            raise AttributeError(f"{problem}\n  {hint}")


_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


# Words of other libraries for a constructor's arguments; the first of ours that a class has is
# named.
_WORDS = {
    "dim": ("head_dim", "embed_dim"),
    "theta": ("base",),
    "rope_theta": ("base",),
    "max_period": ("base",),
    "freqs": ("inv_freq",),
    "heads": ("num_heads", "num_kv_heads"),
    "n_heads": ("num_heads", "num_kv_heads"),
    "num_heads": ("num_kv_heads",),
    "num_attention_heads": ("num_heads", "num_kv_heads"),
    "is_causal": ("causal",),
    "bidirectional": ("causal",),
    "is_decoder": ("causal",),
    "rotary_base": ("base",),
    "temperature": ("base",),
    "head_size": ("head_dim",),
    "dim_head": ("head_dim",),
    "kv_channels": ("head_dim",),
    "custom_freqs": ("inv_freq",),
    "rotary_emb_dim": ("rotary_dim",),
    "rotary_pct": ("rotary_dim",),
    "rotary_percent": ("rotary_dim",),
    "partial_rotary_factor": ("rotary_dim",),
    "rope_scaling": ("scaling",),
    "rope_parameters": ("scaling",),
    "mrope_section": ("axes",),
    "window_size": ("window",),
    "num_embeddings": ("max_len",),
    "max_position_embeddings": ("max_seq_len", "max_len"),
    "max_position": ("max_seq_len", "max_len"),
    "max_seq_len": ("max_len",),
    "d_model": ("embed_dim",),
    "hidden_size": ("embed_dim",),
}


class ReadOnlyArguments(nn.Module):
    """A module whose constructor arguments, which decide its tables, are read-only attributes.

    Arguments that a user's subclass adds may change.
    """

    _arguments: ClassVar[dict[str, inspect.Parameter]] = {}
    # Arguments that nn.Module keeps, because they are modules.
    _children: ClassVar[tuple[str, ...]] = ()

    if TYPE_CHECKING:
        # For nn.Module a call takes and returns Any. Pyright would keep that if each class said
        # `__call__ = forward`.
        def __call__(self: HasForward[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
            """A call takes and returns what the class's forward does."""
            ...

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if cls.__module__.startswith("posenc."):
            parameters = inspect.signature(cls.__init__).parameters.items()
            # A base without a constructor has nn.Module's, (self, *args, **kwargs).
            cls._arguments = {n: p for n, p in parameters if n != "self" and p.kind not in _ANY}
            for name in cls._arguments:
                if not hasattr(cls, name) and name not in cls._children:
                    setattr(cls, name, _SetOnce(name))

    def __new__(cls, *arguments: Any, **keywords: Any) -> Self:
        """Refuse another library's word for an argument with ours."""
        for word in keywords.keys() & _WORDS.keys() - cls._arguments.keys():
            for ours in _WORDS[word]:
                if ours in cls._arguments:
                    raise TypeError(f"{cls.__name__}: {word} is not an argument.\n  Pass {ours}.")
        # Their word means the opposite.
        if {"is_neox_style", "rotate_half"} & keywords.keys() and "interleaved" in cls._arguments:
            rule = f"{cls.__name__}: is_neox_style and rotate_half are not arguments."
            raise TypeError(f"{rule}\n  Pass interleaved=False if they are True.")
        return super().__new__(cls)

    def replace(self, **arguments: Any) -> Self:
        """A new module with this one's constructor arguments, except for those passed here.

        Learned parameters are not copied. A subclass whose constructor takes other arguments
        overrides this.
        """
        return type(self)(**{**self._argument_values(), **arguments})

    def _argument_values(self) -> dict[str, Any]:
        """Constructor arguments by name."""
        return {name: getattr(self, name) for name in self._arguments}

    def extra_repr(self) -> str:
        """The arguments; of keyword-only ones, those that are True or differ from the default."""
        return ", ".join(
            f"{name}={_short(value)}"
            for name, value in self._argument_values().items()
            if self._arguments[name].kind is not inspect.Parameter.KEYWORD_ONLY
            or value is True
            or value != self._arguments[name].default
        )


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


class KeepsFloat32(nn.Module):
    """A module whose numbers are multiplied by positions, and so keep float32 in a cast.

    In bfloat16 a frequency is off by up to 0.4 %: another angle a hundred tokens away.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def move(x: Tensor) -> Tensor:
            moved = fn(x)
            is_rounded = moved.dtype != x.dtype and moved.dtype.itemsize < 4
            return x.to(moved.device) if is_rounded else moved

        return super()._apply(move, recurse)


class Linear(nn.Linear):
    """A linear layer that computes in at least float32, autocast or not."""

    def forward(self, input: Tensor) -> Tensor:
        """The product with the weight, plus the bias."""
        wide = torch.promote_types(input.dtype, self.weight.dtype)
        wide = torch.promote_types(wide, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        with without_autocast(input):
            return nn.functional.linear(input.to(wide), self.weight.to(wide), bias)


def load_scalars(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """A hook of `load_state_dict`, which takes a number ``()`` for a parameter of shape ``(1,)``.

    Learned numbers have one axis, because FSDP2 shards no parameter without one.
    """
    for name, p in module.named_parameters(recurse=False):
        saved = state.get(prefix + name)
        if p.shape == (1,) and isinstance(saved, Tensor) and saved.dim() == 0:
            state[prefix + name] = saved.reshape(1)
