"""Admission: webhooks and ValidatingAdmissionPolicies."""
