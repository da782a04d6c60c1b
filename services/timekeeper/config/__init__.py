"""GPUBudget objects: sources and parsing."""
