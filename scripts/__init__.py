"""Set-up and generators; nothing here is imported by the running processes."""
