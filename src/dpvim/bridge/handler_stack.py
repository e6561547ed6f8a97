"""One thread at a time runs NumPyro models: their stack of handlers is one for all threads."""

from __future__ import annotations

import threading

numpyro_lock = threading.RLock()
"""Held while a model runs. Models of two threads would record each other's sites otherwise."""
