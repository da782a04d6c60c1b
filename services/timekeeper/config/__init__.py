"""Where GPUBudget objects are read from."""
