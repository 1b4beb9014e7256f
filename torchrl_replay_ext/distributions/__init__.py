"""Distributions over the slots of a buffer."""
