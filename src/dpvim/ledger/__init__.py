"""A record of every release from a data set, its budget, and what is left of it."""
