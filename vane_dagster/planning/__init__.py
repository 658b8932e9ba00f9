"""Planning of a run: identities, fragments and keys."""
