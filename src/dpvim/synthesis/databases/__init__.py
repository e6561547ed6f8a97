"""Tables where they are: counts by queries, in DuckDB within the process or in PostgreSQL.

A column's values become cells inside of the engine, by expressions of Ibis' (`reading.py`) that
give the same integers as `dpvim.synthesis.encoding` does. What leaves it are counts of cells.
"""
