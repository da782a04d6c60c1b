"""CustomResourceDefinitions: validation, schemas, and the custom objects they define."""
