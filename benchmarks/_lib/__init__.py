"""What the benchmarks share: each script imports from here, and nothing here is run."""
