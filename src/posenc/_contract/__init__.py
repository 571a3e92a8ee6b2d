"""Shared by all subpackages: argument checks, error texts, and tests of how a call is traced."""
