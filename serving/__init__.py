"""What stands between a client and the target: gateway, worker, and the code that runs inside SGLang."""
