"""Accounts of GPU time: charges, windows, weights and budget states."""
