"""Weight quantizers: pure functions of (weight, statistics, spec, options)."""
