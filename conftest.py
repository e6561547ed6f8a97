"""Settings of all tests and doctests: annotations are checked, and some warnings are no errors."""

from __future__ import annotations

import os
from typing import Any

from jaxtyping import install_import_hook

# Modules whose functions take arrays of one shape and kind. Others also take whatever can be made
# into an array, and have errors of their own for what cannot.
CHECKED = [
    *("dpvim.bridge", "dpvim.models", "dpvim.inference.families", "dpvim.inference.variants"),
    *(f"dpvim.privacy.{name}" for name in ("batches", "clipping", "lattice", "noise", "sampling")),
]

# Before anything imports dpvim. `make test` saves time: it compiles without optimisation,
# and leaves the annotations to `make test-long` and `make test-x64`.
if os.environ.get("DPVIM_TESTS") == "quick":
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0".strip()
else:
    install_import_hook(CHECKED, "annotation_checks.checked")


def pytest_configure(config: Any) -> None:
    """Filters that name classes of dpvim: those in pyproject.toml would import it too early."""
    # Tests fix seeds; that this is announced has a test of its own.
    config.addinivalue_line("filterwarnings", "ignore::dpvim.NotForReleaseWarning")
    # Short runs do not converge; that this is said has a test of its own.
    config.addinivalue_line("filterwarnings", "ignore::dpvim.ConvergenceWarning")
