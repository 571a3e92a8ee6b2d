"""Formulas as MathML, which browsers draw by themselves: nothing is loaded, nothing runs.

Pages write them as GitHub reads them, a fence named ``math`` or $`x`$; docstrings as Sphinx does,
``.. math::`` and ``:math:``. Both become MathML here, and the other roles become links.
"""

import re
from collections.abc import Callable
from typing import Any

_FENCE = re.compile(r"^(?P<indent> *)```math\n(?P<tex>.*?)\n *```$", re.DOTALL | re.MULTILINE)
_DIRECTIVE = re.compile(
    r"^(?P<indent> *)\.\. math::(?P<tex>[^\n]*(?:\n(?P=indent) +[^\n]+)*)$", re.MULTILINE
)
_INLINE = re.compile(r"\$`(?P<tex>[^`]+)`\$|:math:`(?P<role>[^`]+)`")
_REFERENCE = re.compile(r":(?:func|class|meth):`(?P<name>[^`]+)`")

_NAME = r"<mi>(?:sin|cos|ln|max|min)</mi>"
_BEFORE = re.compile(rf"(?:(?<=</m[in]>)|(?<=</msu[bp]>))(?={_NAME})")
_AFTER = re.compile(rf"({_NAME})(?!<mo stretchy)")
_THIN = '<mspace width="0.167em" />'


def mathml(tex: str, *, block: bool = False) -> str:
    """One formula as MathML."""
    from latex2mathml.converter import convert

    drawn = convert(re.sub(r"\s+", " ", tex).strip(), display="block" if block else "inline")
    # Left undone by the converter: underscores in words, brackets that are no identifiers, and the
    # thin spaces around a function's name.
    drawn = drawn.replace(r"\_", "_")
    drawn = re.sub(r"<mi>(&#x0230[89AB];)</mi>", r'<mo stretchy="false">\1</mo>', drawn)
    return _AFTER.sub(rf"\1{_THIN}", _BEFORE.sub(_THIN, drawn))


def translate(text: str, put: Callable[[str, bool], str]) -> str:
    """Put a formula's picture in its place, and a link for each reference.

    Args:
        text: Markdown of a page, or of a docstring.
        put: What stands for a formula, given its TeX and whether it is a block of its own.

    Examples:
        >>> translate("see :meth:`forward` and :func:`posenc.functional.rotate`", str)
        'see `forward` and [`rotate`][posenc.functional.rotate]'
        >>> translate("with :math:`b` and $`c`$", lambda tex, block: f"<{tex}>")
        'with <b> and <c>'
    """

    def block(found: re.Match[str]) -> str:
        return f"\n{found['indent']}{put(found['tex'], True)}\n"

    text = _DIRECTIVE.sub(block, _FENCE.sub(block, text))
    text = _INLINE.sub(lambda found: put(found["tex"] or found["role"], False), text)
    return _REFERENCE.sub(lambda found: _link(found["name"]), text)


def _link(name: str) -> str:
    if not name.startswith("posenc."):
        return f"`{name}`"
    return f"[`{name.rpartition('.')[2]}`][{name}]"


def on_config(config: Any) -> None:
    """Translate before Markdown reads the text, of pages and docstrings alike."""
    # Imported here, because the suite reads this file without the docs extra.
    from markdown import Markdown
    from markdown.extensions import Extension
    from markdown.preprocessors import Preprocessor

    class Formulas(Preprocessor):
        def run(self, lines: list[str]) -> list[str]:
            def put(tex: str, block: bool) -> str:
                return str(self.md.htmlStash.store(mathml(tex, block=block)))

            return translate("\n".join(lines), put).split("\n")

    class Translation(Extension):
        def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
            # Ahead of fenced code, which has priority 25.
            md.preprocessors.register(Formulas(md), "formulas", 28)

    config.markdown_extensions.append(Translation())
