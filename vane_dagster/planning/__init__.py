"""What a run must compute: identities, fragments and keys."""
