"""What the library needs of Triton beyond its language: to compile a kernel, load it and run it.

Only this file uses names of Triton that its manual does not have;
tests/_contract/test_triton_private.py tests each of them. Triton is imported when one of these is
first called.
"""

from __future__ import annotations

from typing import Any, NamedTuple


def target() -> Any:
    """The current device as Triton's compiler knows it."""
    from triton.runtime import driver

    return driver.active.get_current_target()


def compile(
    kernel: Any,
    signature: dict[str, Any],
    constants: dict[tuple[int, ...], Any],
    attributes: dict[tuple[int, ...], Any],
    target: Any,
    options: dict[str, Any],
) -> Any:
    """Compile a kernel from a description of its arguments; nothing is loaded."""
    import triton
    from triton.compiler import ASTSource

    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def is_loaded(compiled: Any) -> bool:
    """Whether a compiled kernel is in a device's memory."""
    return compiled.module is not None


def load(compiled: Any) -> None:
    """Load a compiled kernel into the memory of the current device."""
    compiled._init_handles()


def run(compiled: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
    """Launch a kernel that is loaded, on the current stream; constants are among the arguments."""
    compiled[grid](*arguments)


def interpreted(constant: Any) -> Any:
    """A constant of an aggregate as the interpreter wants it: its kernels compute with numbers."""
    import triton.language as tl

    return tl.constexpr(constant) if isinstance(constant, (bool, int, float, str)) else constant


class Loaded(NamedTuple):
    """A kernel as the driver knows it."""

    function: int
    threads: int
    shared: int
    overlaps: int  # whether it may start during the kernel before it


def about(compiled: Any) -> Loaded | None:
    """What a launch by the driver needs of a kernel that is loaded; None if that is not enough."""
    found = compiled.metadata
    if found.global_scratch_size or found.profile_scratch_size or found.num_ctas != 1:
        return None
    if found.launch_cooperative_grid:
        return None
    threads = found.num_warps * found.target.warp_size
    return Loaded(compiled.function, threads, found.shared, int(found.launch_pdl))
