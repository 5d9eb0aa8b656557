"""The trainer: a Ray driver and its actors."""
