"""Lengths of time slices that leases of claims ask for."""
