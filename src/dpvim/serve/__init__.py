"""A page on this machine that makes a twin of a table: ``dpvim serve``."""
