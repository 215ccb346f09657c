"""Named models and published checkpoints."""
