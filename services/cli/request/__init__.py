"""`leasehold explain --request`: reading the pods of a manifest."""
