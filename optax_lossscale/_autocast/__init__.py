"""Automatic mixed precision: only products run low, and nothing else changes."""
