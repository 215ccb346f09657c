"""The tasks: one folder each, the only rooms that know what is learned."""
