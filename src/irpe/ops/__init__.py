"""Attention with relative position encodings: one meaning, several ways to compute it."""
