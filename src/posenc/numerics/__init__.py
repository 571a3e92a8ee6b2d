"""Rates, angles, tables and slopes: pure functions in float64, before any rounding."""
