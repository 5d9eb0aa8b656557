"""The gateway: a thin OpenAI-compatible pass-through in front of the workers."""
