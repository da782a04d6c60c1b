"""Odd inputs, and servers in a thread that receive them."""
