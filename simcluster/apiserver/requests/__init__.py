"""Requests: what they target and ask for, and how lists, patches and writes are carried out."""
