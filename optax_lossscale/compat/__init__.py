"""The classes of other libraries, run by this package, by one changed import."""
