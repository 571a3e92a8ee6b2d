"""Float64, pure, small: rates, angles, tables and slopes, before any rounding."""
