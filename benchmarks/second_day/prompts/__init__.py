"""The three days with prompts, whose answers an endpoint counts and prices."""
