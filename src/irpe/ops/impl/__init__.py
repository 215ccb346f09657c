"""The ways to compute the attention. None of them imports another."""
