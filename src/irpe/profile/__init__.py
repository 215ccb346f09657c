"""Parameters, multiply-accumulates, latency and memory of a model."""
