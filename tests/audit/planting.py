"""Faults, and helpers to plant them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from dpvim.models import mixture_sum, regression
from dpvim.privacy import clipping


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, and where the cheapest check that should see it is.

    `plant` is a context manager: while it is open a function of the library is replaced, the way a
    programming error would replace it, and the accounting is as it was.
    """

    name: str
    plant: Callable[[], Any]
    check: str
    path: str = "gradients"
    family: str = "mean_field"
    variant: str = "aligned"


def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
    """Replace `owner.name` by what `make` makes of it."""
    return mock.patch.object(owner, name, make(getattr(owner, name)))


@contextmanager
def everywhere(name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a function of `clipping` wherever a clipped sum has it from there."""
    with ExitStack() as planted:
        for owner in (clipping, regression, mixture_sum):
            planted.enter_context(patch(owner, name, make))
        yield
