"""Publishing: the parts of `write` stages, moved to a target that any tool can read."""
