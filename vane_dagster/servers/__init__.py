"""Model servers: their declarations, their processes, and the endpoints that workers call."""
