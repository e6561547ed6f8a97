"""Counts with a checkpoint: every round is released once, and bits do not depend on crashes."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest
from crashing_disk import Killed, install

from dpvim import checkpoints, files
from dpvim.archives import FileError
from dpvim.checkpoints import BEGIN, RESULT, STATE
from dpvim.privacy.counts import CountMechanism, counts_plan
from dpvim.privacy.randomness import SecretStreams
from dpvim.synthesis.encoding import encode
from dpvim.synthesis.fitting import synthesize
from dpvim.synthesis.marginals import fit as fit_module
from dpvim.synthesis.marginals.kept import KeptRounds
from dpvim.synthesis.marginals.release import codes_of, design, release
from dpvim.synthesis.tables import write_table
from dpvim.types import BudgetExceededError, Relation

SECRET = bytes(range(32))


@pytest.fixture(autouse=True)
def known_secrets(monkeypatch):
    monkeypatch.setattr(checkpoints, "fresh_secret", lambda: SECRET)


@pytest.fixture(scope="module")
def counting(patients, schema):
    """Counts the patients with a checkpoint, and says how often the table was read."""
    plan = counts_plan(num_examples=400, relation=Relation.ZERO_OUT).calibrate(
        epsilon=2.0, delta=1e-4
    )
    wanted = design(schema, plan)
    assert min(wanted.shares) > 0  # two rounds
    codes = codes_of(encode(patients, schema), schema, wanted.grids)

    def count(folder):
        read = []

        def pieces():
            read.append(1)
            return [codes]

        with checkpoints.opened(folder, {}, b"") as checkpoint:
            mechanism = CountMechanism(plan, checkpoint.streams(), pieces)
            rounds = KeptRounds(mechanism, checkpoint)
            found = release(rounds, wanted)
            rounds.finish()
            assert mechanism.share_spent == pytest.approx(1.0)
            with pytest.raises(BudgetExceededError):
                mechanism.skip(0.1, None)
        noisy = [each.counts.tobytes() for each in found.noisy]
        groups = [part.tobytes() for each in found.groups for part in each]
        return (noisy, [each.variance for each in found.noisy], groups), len(read)

    return count


def test_a_crash_at_any_file_operation_releases_the_same_counts(counting, tmp_path, monkeypatch):
    wanted, read = counting(tmp_path / "whole")
    assert read == 2
    disk = install(monkeypatch)
    assert counting(tmp_path / "counted") == (wanted, 2)
    again = []
    chosen = {i for i, name in enumerate(disk.log) if name != "write"} | {*range(0, disk.done, 20)}
    for crash_at in sorted(chosen):
        folder = tmp_path / str(crash_at)
        install(monkeypatch, crash_at)
        with pytest.raises(Killed):
            counting(folder)
        monkeypatch.setattr(files, "os", os)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*ended before")
            found, read = counting(folder)
        assert found == wanted, (crash_at, disk.log[crash_at])
        assert os.listdir(folder) == [RESULT]
        again.append(read)
    # From the beginning; from the second round; nothing at all.
    assert set(again) == {0, 1, 2}
    assert again == sorted(again, reverse=True)


def test_a_skipped_round_is_paid_for_and_its_noise_is_not_used_again(patients, schema):
    plan = counts_plan(num_examples=400, relation=Relation.ZERO_OUT).calibrate(
        epsilon=2.0, delta=1e-4
    )
    first, second = (CountMechanism(plan, SecretStreams(secret=SECRET), list) for _ in range(2))
    first._generator.standard_normal(10)
    second.skip(0.6, first.position())
    np.testing.assert_array_equal(
        first._generator.standard_normal(5), second._generator.standard_normal(5)
    )
    with pytest.raises(BudgetExceededError):
        second.skip(0.6, None)


def test_a_twin_goes_on_after_its_counts_and_ends_with_the_same_bits(
    patients, schema, tmp_path, monkeypatch
):
    def twin(folder, source=patients, **changes):
        options = {"epsilon": 5.0, "components": 4, "progress": False, **changes}
        found = synthesize(source, schema, checkpoint=folder, **options)
        parts = [*found.fit.traits.best, *found.fit.traits.wide, found.fit.traits.scales]
        return [np.asarray(part).tobytes() for part in parts], found.privacy

    wanted = twin(tmp_path / "whole")
    assert wanted[1].private

    def killed(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(fit_module, "fit_traits", killed)
        with pytest.raises(Killed):
            twin(tmp_path / "run")
    # The counts are public, so nothing secret is left when they are released.
    assert os.listdir(tmp_path / "run") == [RESULT]
    for other in ({"epsilon": 4.0}, {"components": 5}, {"target": "age"}):
        with pytest.raises(FileError, match="run with other"):
            twin(tmp_path / "run", **other)
    # No noise is left to be used twice: the counts that were released are the result.
    with pytest.warns(UserWarning, match="whatever the data are"):
        assert twin(tmp_path / "run", source=patients.assign(age=patients["age"] + 1)) == wanted
    with pytest.warns(UserWarning, match="ended before"):
        assert twin(tmp_path / "run") == wanted
    write_table(patients[schema.names], tmp_path / "patients.csv")
    assert len(twin(tmp_path / "file", source=tmp_path / "patients.csv")[0]) == len(wanted[0])
    with open(tmp_path / "patients.csv", "a") as file:
        file.write("1,f,01,20,1.0\n")
    with pytest.raises(FileError, match="run with other"):
        twin(tmp_path / "file", source=tmp_path / "patients.csv")


def test_damaged_counts_are_refused(counting, tmp_path):
    with checkpoints.opened(tmp_path, {}, b"") as checkpoint:
        checkpoint.save({"0.variances": np.ones(2), "0.0": np.zeros(3, int)})
    with pytest.raises(FileError, match="damaged"):
        counting(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [BEGIN, STATE]
