"""Scripts: planted faults, sizes, versions, releases."""
