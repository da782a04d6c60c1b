"""Reports about budgets: statuses, Events and showback."""
