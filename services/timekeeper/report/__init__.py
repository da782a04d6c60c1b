"""Reports about budgets: object statuses, Events, metrics, showback."""
