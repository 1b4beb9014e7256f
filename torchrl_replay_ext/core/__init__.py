"""State over the slots of a buffer, and algorithms on it."""
