"""Values that all services share: devices, requests, leases, quotas, budgets and events."""
