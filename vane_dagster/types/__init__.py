"""Column types, schemas and SQL expressions, shared by all packages."""
