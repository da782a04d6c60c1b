"""The timekeeper: counts GPU time per namespace from leases, and says what budgets are left."""
