"""Modules that the benchmark scripts import; none of them is a script itself."""
