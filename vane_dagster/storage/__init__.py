"""Storage of results: parts are written once, then the manifest that names them."""
