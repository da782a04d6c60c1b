"""What namespaces may use: budgets, quotas, fair shares and recorded costs."""
