"""The admission webhook: denies pods that Leasehold must not run, and completes GPU requests."""
