"""Other libraries' classes under their own names: change one import, and keep the rest.

Each module here has the public names of one library. Scripts and checkpoints that were
written for that library continue with the rules of this package. A module is loaded
when you import it, so the other library is needed only where the module says so.
"""
