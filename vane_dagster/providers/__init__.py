"""Models behind one interface: each provider is a small class. See `base.Provider`."""
