"""Enforcers: what holds shares of devices, one module each, and the table of them."""
