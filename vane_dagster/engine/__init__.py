"""Fragments streamed through the stages of a run, on Ray or in subprocesses."""
