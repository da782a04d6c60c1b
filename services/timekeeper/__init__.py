"""The timekeeper: charges GPU time of leases to namespaces, and reports their budgets."""
