"""GPU time accounts: accrual, windows, weights and budget state."""
