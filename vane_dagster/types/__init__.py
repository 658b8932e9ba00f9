"""Types of columns, schemas and SQL expressions, which every package agrees on."""
