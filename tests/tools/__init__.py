"""Scripts: mutation testing, versions, releases, a long run with faults."""
