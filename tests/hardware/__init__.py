"""What holds on a real GPU; without one, what can be seen on the simulated driver."""
