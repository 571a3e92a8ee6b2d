"""The sub-commands of `posenc`: a file for each, a thin layer over `lab` or `interop`."""

from posenc_command import application, main

__all__ = ["application", "main"]
