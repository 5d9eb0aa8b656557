"""Where the README's figures come from; each module prints a table and writes JSON to `benchmarks/results`."""
