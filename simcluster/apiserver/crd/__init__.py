"""CustomResourceDefinitions: their validation, their schemas and the objects they define."""
