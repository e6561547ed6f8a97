"""The page about a twin: text, tables, charts."""
