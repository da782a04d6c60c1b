"""`leasehold up` and `leasehold down`: everything on one machine, under one supervisor."""
