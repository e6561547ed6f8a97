"""``dpvim doctor``: what dpvim finds on this machine."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import typer

import dpvim
from dpvim import cache
from dpvim._extras import EXTRAS
from dpvim.cli.common import FOUND, print_json
from dpvim.cli.options import AsJson

# The requirement of a package without conditions: jax<0.11,>=0.8
_REQUIREMENT = re.compile(r"([\w.-]+)\s*([^;]*)")
_LIMIT = re.compile(r"(>=|<)\s*([\d.]+)")


class Package(NamedTuple):
    """A package that dpvim needs: the version that is there, and those that will do."""

    name: str
    found: str | None
    wanted: str

    @property
    def is_fine(self) -> bool:
        return self.found is not None and suits(self.found, self.wanted)


def doctor(as_json: AsJson = False) -> None:
    """Look at this machine: versions, threads, memory, data, extras, and what to type to mend it.

    Ends with 1 if something is wrong. An extra that is not installed is not: what it is for and
    how to get it is shown.

    Example: `dpvim doctor`
    """
    facts = findings()
    if as_json:
        print_json(facts)
    else:
        _show(facts)
    if facts["problems"]:
        raise typer.Exit(FOUND)


def findings() -> dict[str, Any]:
    """All that is found, ready for json; ``problems`` has what is wrong, and what to do."""
    packages = required_packages()
    facts: dict[str, Any] = {
        "dpvim": dpvim.__version__,
        "folder": str(Path(dpvim.__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {each.name: each.found for each in packages},
        "compute": _compute(),
        "memory": _memory(),
        "data": _data(),
        "cache": _cache(),
        "extras": {name: _extra(name) for name in EXTRAS},
    }
    return {**facts, "problems": _problems(packages, facts)}


def required_packages() -> list[Package]:
    """The packages that the installed dpvim says it needs."""
    try:
        needed = metadata.requires("dpvim") or []
    except metadata.PackageNotFoundError:  # a folder that was never installed
        return []
    found = []
    for text in needed:
        if "extra ==" in text or (match := _REQUIREMENT.match(text)) is None:
            continue
        found.append(Package(match[1], _version(match[1]), match[2].strip()))
    return found


def suits(version: str, limits: str) -> bool:
    """True if a version is within limits.

    >>> suits("0.10.2", ">=0.8,<0.11"), suits("0.11.0rc1", ">=0.8,<0.11")
    (True, False)
    """
    own = _numbers(version)
    return all((own >= _numbers(limit)) == (sign == ">=") for sign, limit in _LIMIT.findall(limits))


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with; zeros at its end say nothing."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else [0]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _compute() -> dict[str, Any]:
    import jax

    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "cores": os.cpu_count(),
        "usable_cores": len(affinity(0)) if affinity is not None else os.cpu_count(),
        "devices": [str(device) for device in jax.devices()],
        "x64": bool(jax.config.read("jax_enable_x64")),
        "settings": {
            name: os.environ[name]
            for name in ("OMP_NUM_THREADS", "XLA_FLAGS", "JAX_PLATFORMS")
            if name in os.environ
        },
    }


def _memory() -> dict[str, float | None]:
    """Gigabytes; None where the system does not tell."""
    found: dict[str, float | None] = {"total_gb": None, "available_gb": None}
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", meminfo.read_text(), re.MULTILINE))
        for name, key in (("total_gb", "MemTotal"), ("available_gb", "MemAvailable")):
            if key in sizes:
                found[name] = round(int(sizes[key]) / 2**20, 1)
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found["total_gb"] = round(size / 2**30, 1)
    return found


def _data() -> dict[str, Any]:
    """The folder of the experiments' data, which twins and fits of your own do not need."""
    named = os.environ.get("DPVIM_DATA")
    folder = Path(named) if named else None
    there = folder is not None and folder.is_dir()
    return {
        "DPVIM_DATA": named,
        "found": sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder and there else [],
    }


def _cache() -> dict[str, Any]:
    folder = cache.folder()
    return {
        "DPVIM_CACHE": os.environ.get("DPVIM_CACHE"),
        "folder": None if folder is None else str(folder),
        "answers": 0 if folder is None else len(list(folder.glob("*.json"))),
    }


def _extra(name: str) -> dict[str, Any]:
    missing = [module for module in EXTRAS[name].modules if not _is_there(module)]
    return {
        "for": EXTRAS[name].purpose,
        "missing": missing,
        "install": f"pip install 'dpvim[{name}]'" if missing else None,
    }


def _is_there(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def _problems(packages: list[Package], facts: dict[str, Any]) -> list[str]:
    problems = []
    for each in packages:
        if not each.is_fine:
            found = f"found {each.found}" if each.found else "it is not installed"
            problems.append(
                f"{each.name}: expected {each.wanted}, {found}. Type: "
                f"pip install '{each.name}{each.wanted}'"
            )
    named = facts["data"]["DPVIM_DATA"]
    if named and not Path(named).is_dir():
        problems.append(
            f"DPVIM_DATA: expected a folder, there is none at {named}. Type: unset DPVIM_DATA"
        )
    chosen = facts["cache"]["DPVIM_CACHE"]
    if facts["cache"]["folder"] is None and not cache.is_switched_off(chosen):
        problems.append(
            "DPVIM_CACHE: noise multipliers cannot be kept in the folder for caches, which has to "
            "be yours alone; plans take longer. Type: export DPVIM_CACHE=~/.cache/dpvim-own"
        )
    return problems


def _show(facts: dict[str, Any]) -> None:
    compute, memory, data, kept = (facts[k] for k in ("compute", "memory", "data", "cache"))
    typer.echo(f"dpvim     {facts['dpvim']} in {facts['folder']}")
    typer.echo(f"python    {facts['python']}, {facts['platform']}")
    for name, version in facts["packages"].items():
        typer.echo(f"          {name} {version or 'NOT INSTALLED'}")
    settings = "".join(f", {name}={value}" for name, value in compute["settings"].items())
    typer.echo(
        f"compute   {compute['usable_cores']} of {compute['cores']} cores, "
        f"{', '.join(compute['devices'])}, {'double' if compute['x64'] else 'single'} precision"
        f"{settings}"
    )
    typer.echo(f"memory    {memory['available_gb']} of {memory['total_gb']} GB available")
    found = ", ".join(data["found"]) or "nothing"
    typer.echo(
        f"data      {found} in DPVIM_DATA={data['DPVIM_DATA']}"
        if data["DPVIM_DATA"]
        else "data      DPVIM_DATA is not set; dpvim reproduce downloads what it can"
    )
    typer.echo(
        f"cache     {kept['answers']:,} noise multipliers in {kept['folder']}"
        if kept["folder"]
        else "cache     none"
    )
    typer.echo("extras")
    for name, extra in facts["extras"].items():
        state = "is there" if not extra["missing"] else f"missing: {extra['install']}"
        typer.echo(f"  {name:<10} {extra['for']:<44} {state}")
    for problem in facts["problems"]:
        typer.echo(f"\nProblem: {problem}")
    if not facts["problems"]:
        typer.echo("\nAll is well.")
