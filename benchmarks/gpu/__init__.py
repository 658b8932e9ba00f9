"""MiniLM and vLLM on a GPU, beside a bare loop and Ray Data."""
