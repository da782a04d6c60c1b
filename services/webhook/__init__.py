"""The admission webhook: denies pods that could exceed their limits, completes GPU requests."""
