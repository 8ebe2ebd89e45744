"""Lets Sphinx read docstrings that are written in Markdown."""


def setup(app):
    return {"parallel_read_safe": True}
