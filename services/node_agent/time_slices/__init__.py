"""The length of each GPU's time slices: what leases ask for, and the program that sets it."""
