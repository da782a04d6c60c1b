"""Admission: webhooks, ValidatingAdmissionPolicies and the CEL expressions in them."""
