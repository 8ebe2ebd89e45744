"""Modules that the tests of every folder import."""
