"""Identity of the user's code and values, and the code's way to workers."""
