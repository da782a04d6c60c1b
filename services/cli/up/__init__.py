"""`leasehold up` and `leasehold down`: running everything on one machine."""
