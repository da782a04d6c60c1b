"""Any input, to everything that reads one."""
