"""GPUBudget objects: where they come from, and how they are parsed."""
