"""AIM and MST on a table of codes, for benchmarks/twin_quality.py, in an environment of their own:

    python3.11 -m venv /tmp/peers && /tmp/peers/bin/pip install dpmm==0.1.9
    /tmp/peers/bin/python benchmarks/twin_peers.py aim table.npz tables/ --epsilon 1 --delta 1e-6

`dpmm` (SAS, Python 3.10 or 3.11) is what installs: its AIM and MST are adapted from the authors'
own. The wheel of `mbi` 2 has the inference of private-pgm, but none of its mechanisms.

Settings are dpmm's defaults, which are the authors': AIM with pairs as its workload, 16 rounds a
column to begin with, models of up to 80 MB, 1000 iterations a round; MST with 5000 iterations; both
join levels that are rarer than three standard deviations of the noise. Rows are made by rounding
expected counts, not by drawing, as the authors do. The seed is that of choices and rows: the noise
comes from OpenDP, which takes none.

table.npz holds `codes` (rows by columns) and `sizes` (how many codes each column can have). The
folder gets 000.npy, 001.npy, ..., and facts.json once the first one is there.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd


def peak_memory() -> float:
    """Largest resident size of this process so far, in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    from dpmm.models import (  # type: ignore[import-not-found,unused-ignore]
        AIMGM,
        MSTGM,
    )

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=["aim", "mst"])
    parser.add_argument("table", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epsilon", type=float, required=True)
    parser.add_argument("--delta", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1, help="tables to make")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    with np.load(args.table) as table:
        codes, sizes = table["codes"], table["sizes"]
    names = [f"c{i:02}" for i in range(len(sizes))]
    frame = pd.DataFrame(codes.astype(np.int64), columns=names)

    began = time.process_time()
    model = {"aim": AIMGM, "mst": MSTGM}[args.method](
        epsilon=args.epsilon,
        delta=args.delta,
        domain=dict(zip(names, sizes.tolist(), strict=True)),
        random_state=np.random.RandomState(args.seed),
        n_jobs=1,
    )
    model.fit(frame)
    for number in range(args.count):
        drawn = model.generate(len(frame))[names].to_numpy(np.int32)
        np.save(args.folder / f"{number:03}.npy", drawn)
        if number == 0:
            seconds = time.process_time() - began
            facts = {"cpu_seconds": seconds, "memory_mb": peak_memory()}
            (args.folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
