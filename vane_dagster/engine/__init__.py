"""The driver of a run: streams fragments through the stages, on Ray or in subprocesses."""
