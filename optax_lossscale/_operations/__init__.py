"""Numbers of every operation of a program, from one compiled run."""
