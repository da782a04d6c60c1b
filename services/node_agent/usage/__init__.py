"""Device usage: attribution to containers, measurements, violations, metrics."""
