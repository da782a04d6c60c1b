"""Programs of simulated containers."""
