"""Speed and memory, measured side by side; nothing here is a test."""
