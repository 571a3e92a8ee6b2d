"""The sub-commands of `posenc`: a file for each, a thin layer over `lab` or `interop`."""

from posenc_command import INSTALL, application, main

__all__ = ["INSTALL", "application", "main"]
