"""Encodings compared: equal budget, several seeds, a report in plain words."""
