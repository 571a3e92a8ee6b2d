"""Float64, pure, small: positions, rates, angles, tables and slopes, before any rounding."""
