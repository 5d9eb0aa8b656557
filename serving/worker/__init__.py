"""The worker: launches stock SGLang with our plugin, proves that it speculates, and swaps drafters in it."""
