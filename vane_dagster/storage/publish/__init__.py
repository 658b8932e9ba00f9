"""Publishing: the parts of `write` stages, put where any tool reads them."""
