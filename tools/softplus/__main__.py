"""Print the polynomials of softplus in the kernels: `python tools/softplus`.

`exp(r)` for `|r| <= ln 2 / 2`, and `log1p(u) = u + u^2 R(u)` for `0 <= u <= 1`: Chebyshev
interpolation in 60 digits, lowest power first, with the largest relative error of each.
"""

from __future__ import annotations

from collections.abc import Callable

from mpmath import mp, mpf

mp.dps = 60


def interpolated(f: Callable[[mpf], mpf], low: mpf, high: mpf, degree: int) -> list[mpf]:
    """Coefficients of the polynomial that equals ``f`` at the Chebyshev points."""
    middle, half = (low + high) / 2, (high - low) / 2
    count = degree + 1
    at = [middle + half * mp.cos(mp.pi * (2 * i + 1) / (2 * count)) for i in range(count)]
    powers = mp.matrix(count, count)
    for i, x in enumerate(at):
        for j in range(count):
            powers[i, j] = x**j
    return list(mp.lu_solve(powers, mp.matrix([f(x) for x in at])))


def rest(u: mpf) -> mpf:
    """``R(u)`` above; its limit at zero is -1/2."""
    return (mp.log1p(u) - u) / u**2 if u else mpf(-0.5)


def error(near: Callable[[mpf], mpf], f: Callable[[mpf], mpf], low: mpf, high: mpf) -> float:
    """The largest relative error at 2000 points."""
    at = [low + (high - low) * (mpf(2 * i + 1)) / 4000 for i in range(2000)]
    return float(max(abs(near(x) / f(x) - 1) for x in at))


def shown(name: str, numbers: list[mpf], wrong: float) -> None:
    """Print one polynomial."""
    print(f"{name}: relative error 2^{float(mp.log(wrong, 2)):.1f}")
    print(",\n".join(f"    {float(number)!r}" for number in numbers))


def main() -> None:
    """Print the polynomials for results in float32, and in half precision."""
    edge = mp.log(2) / 2
    for kind, exp_degree, log_degree in (("float64", 7, 11), ("float32", 5, 6)):
        exp = interpolated(mp.exp, -edge, edge, exp_degree)
        wrong = error(lambda r, p=exp: mp.polyval(p[::-1], r), mp.exp, -edge, edge)
        shown(f"exp in {kind}", exp, wrong)
        log = interpolated(rest, mpf(0), mpf(1), log_degree)
        wrong = error(lambda u, p=log: u + u**2 * mp.polyval(p[::-1], u), mp.log1p, mpf(0), mpf(1))
        shown(f"R in {kind}", log, wrong)


if __name__ == "__main__":
    main()
