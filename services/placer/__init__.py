"""Where a pod should run: filters, the index of gaps, the choice, and the words for a refusal."""
