"""`leasehold explain --request`: the pods of a manifest, placed on an example node."""
