"""Pages for keys and values: which sequence has which pages, and where each token goes."""

from posenc.cache._pool import OutOfPages
from posenc.cache.paged import PagedCache

__all__ = ["OutOfPages", "PagedCache"]
