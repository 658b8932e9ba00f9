"""The day after: what is computed again, and whether the output equals a run from nothing."""
