"""The whole story on real data: schema, plan, private fit, synthetic twin, analysis, report.

    python examples/demo.py [--epsilon 1.0] [--output demo-output]

6366 women answered a survey in 1974 (Fair 1978; the data come with statsmodels). The holder wants
to publish a twin of the answers; the analyst, who has only the twin, asks what goes with having an
affair. Every step is a command of dpvim, and is shown before it runs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from statsmodels.datasets import fair

SCHEMA = os.path.relpath(Path(__file__).with_name("affairs.toml"))
FORMULA = "affair ~ rate_marriage + religious + yrs_married"


def write_survey(path: Path) -> int:
    """The sensitive table as the holder has it: whole numbers and halves, yes and no."""
    table = fair.load_pandas().data
    texts = table.drop(columns=["affairs", "occupation", "occupation_husb"]).map("{:g}".format)
    texts["affair"] = (table["affairs"] > 0).map({True: "yes", False: "no"})
    texts.to_csv(path, index=False)
    return len(texts)


def run(*arguments: object) -> None:
    """Show a command of dpvim and run it."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ dpvim {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "dpvim", *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    options = parser.parse_args()
    shutil.rmtree(options.output, ignore_errors=True)
    options.output.mkdir(parents=True)
    survey, twin = options.output / "survey.csv", options.output / "twin"
    rows = write_survey(survey)
    model = ["--target", "affair", "--epsilon", options.epsilon]

    print("The holder: what is public about the table, and what a twin will cost.")
    run("schema", "check", SCHEMA)
    run("plan", "--schema", SCHEMA, "--rows", rows, *model)
    print("\nThe holder: the twin. Its folder can be published.")
    # Tables larger than the original show the model's uncertainty better, and cost nothing.
    drawn = ["--datasets", 20, "--rows", 20_000]
    run("synth", survey, "--schema", SCHEMA, *model, *drawn, "-o", twin)
    print("\nThe analyst, with the twin alone:")
    run("analyze", twin, FORMULA, "--family", "logistic")
    run("report", twin)
    print(
        "\nThe holder again: how good is the twin? This compares with the data, so it stays here."
    )
    comparison = options.output / "report-NOT-FOR-RELEASE.html"
    run("report", twin, "--compare", survey, "-o", comparison)
    print(f"\nOpen {twin / 'report.html'} and {comparison}.")


if __name__ == "__main__":
    main()
