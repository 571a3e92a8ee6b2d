"""The rotation for the ``kernels`` package, by which transformers replaces functions itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from posenc._contract import checks
from posenc.interop.huggingface.recognition import Match, recognise

# The name that transformers gives the rotation in that package.
LAYER = "rotary_pos_emb"


class _Repository:
    """One layer, as that package asks for it: a class of modules without a state."""

    def __init__(self, match: Match) -> None:
        class RotaryPosEmb(nn.Module):
            can_torch_compile = True
            has_backward = True

            def forward(
                self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
            ) -> Any:
                if unsqueeze_dim == 1:
                    return match.function(q, k, cos, sin)
                return match.function(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

        self.layer = RotaryPosEmb

    def load(self) -> type[nn.Module]:
        return self.layer


def kernel_mapping(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The rotation of ``model`` by posenc, for ``use_kernel_mapping`` of the ``kernels`` package.

    transformers marks the rotation of most families for that package, if it finds a version of it
    that it supports when it is imported. ``kernelize`` then replaces the function for all models of
    the family in this process, and nothing else of posenc: no fused norm, no exact tables. For
    these, and for other models, call :func:`patch`.

    Args:
        model: A model of transformers. It is not changed.

    Returns:
        A mapping for the devices ``cpu`` and ``cuda``, to train and to compile with.

    Examples:
        Rotate in the same way as the model does, by posenc::

            from kernels import Mode, kernelize, use_kernel_mapping

            with use_kernel_mapping(kernel_mapping(model)):
                kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE)
    """
    functions = {
        function
        for module in model.modules()
        for function in getattr(module, "_kernel_funcs", {}).values()
        if getattr(function, "kernel_layer_name", None) == LAYER
    }
    who, hint = "kernel_mapping", "Call posenc.interop.huggingface.patch(model)."
    if not functions:
        rule = f"the model must have a function that is marked as {LAYER!r} for the kernels package"
        checks.fail(who, rule, f"{type(model).__name__} without one", hint)
    matches = [recognise(function) for function in functions]
    if None in matches or len({match[:2] for match in matches if match}) > 1:
        got = ", ".join(f"{match.layout} [{match.variant}]" if match else "?" for match in matches)
        checks.fail(who, "the model must have one rotation that posenc has too", got, hint)
    repository = _Repository(next(match for match in matches if match))
    return {LAYER: {"cpu": repository, "cuda": repository}}
