"""Identity of the user's code and values, and the packaging of code for workers."""
