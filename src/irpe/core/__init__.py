"""The mathematics: index functions, methods, specifications and bucket maps."""
