"""Usage: processes on GPUs, metrics in the names of HAMi and Volcano, violations."""
