"""The demo: starts every process on one machine, sends traffic and shows the drafter learning."""
