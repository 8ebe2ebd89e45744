"""Automatic mixed precision: evaluate a float32 program with casts."""
