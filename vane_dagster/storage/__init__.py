"""Where results become visible: parts written once, and the manifest that names them, last."""
