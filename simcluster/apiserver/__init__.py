"""The simulated API server: what it serves, keeps, checks and admits."""
