"""A fit over several processes: what they tell each other before it, and what cannot be shared.

Nobody sees another's records. Process 0 learns how many there are in each shard, and a digest of
them; all get the number in total, and the secret of the batches.
"""

from __future__ import annotations

import hashlib
import json
import platform
import secrets
import struct
from importlib import metadata
from typing import Any, NamedTuple

import jax
import numpy as np

from dpvim.bridge.data import ModelInput, map_arrays
from dpvim.bridge.persons import GROUP_BY, rows_of
from dpvim.channel import Channel
from dpvim.fingerprint import data_digest
from dpvim.inference.sharing import Sharing
from dpvim.options import Budget, FitOptions
from dpvim.prepared import PreparedFit
from dpvim.privacy.randomness import SECRET_BYTES, SecretStreams, fresh_key
from dpvim.privacy.shards import Shard, ShardStreams
from dpvim.resumable import question_of
from dpvim.types import Relation

_SIZE = struct.Struct("<q")
# Shards with fewer rows may well be alike.
_FEW_ROWS = 20
_PACKAGES = ("dpvim", "jax", "jaxlib", "numpy", "randomgen")


class Job(NamedTuple):
    """A fit over several processes, as one of them sees it.

    Attributes:
        inputs: The records of the shard, and the number of all.
        sharing: What steps have to do with the others.
        streams: Batches, which all have in common, and in process 0 the noise.
        start: Key of what is random in all processes alike and protects no privacy.
        data: What the records of all shards are known by; see `dpvim.fingerprint`.
    """

    inputs: ModelInput
    sharing: Sharing
    streams: SecretStreams
    start: jax.Array
    data: AllShards


class AllShards(NamedTuple):
    """The records of all processes, known by the digests of the shards in their order."""

    digests: tuple[bytes, ...]

    def digest(self) -> bytes:
        """A digest of all records. Secret."""
        return hashlib.sha256(b"".join(self.digests)).digest()


def refuse_what_cannot_be_shared(length: Any, options: FitOptions, data: dict[str, Any]) -> None:
    """Refuse what needs all records in one place, or a state that is kept in one."""
    if not isinstance(length, Budget):
        raise ValueError(
            "fit_nonprivate: expected one process, got several. Sums without a clip are not of "
            "integers: they would not be those of one process."
        )
    if options.checkpoint is not None:
        raise ValueError(
            "checkpoint: expected none over several processes, got one. A run that loses a process "
            "ends; it costs the steps that were begun."
        )
    if data.get(GROUP_BY) is not None or length.max_rows_per_person is not None:
        raise ValueError(
            "group_by: expected none over several processes, got persons. The rows of a person "
            "might lie in several of them, and nobody sees all. Fit in one process."
        )
    if length.relation == Relation.ADD_OR_REMOVE:
        raise ValueError(
            "relation: expected 'zero_out' or 'replace_one' over several processes, got "
            "'add_or_remove': where rows stand would tell how many there are."
        )


def begin(channel: Channel, args: Any, kwargs: dict[str, Any], seed: int | None) -> Job:
    """Read the shard of this process, and agree with the others on what all have in common.

    Raises:
        ValueError: If the records cannot be used, or if processes have the same ones.
    """
    num_rows = _num_rows(args, kwargs)
    if num_rows == 0:  # a row that is in no batch stands for the shapes
        args, kwargs = map_arrays(_one_row, (args, kwargs))
    inputs = rows_of(args, kwargs)
    found = channel.all(_SIZE.pack(num_rows) + data_digest(inputs.records))
    sizes = [_SIZE.unpack_from(each)[0] for each in found]
    _refuse_twins(sizes, found)
    total, number = sum(sizes), channel.number
    if total == 0:
        raise ValueError("data: expected at least one record, got arrays with no rows.")
    mine = (secrets.token_bytes(SECRET_BYTES), np.asarray(jax.random.key_data(fresh_key())))
    told = channel.share(mine[0] + mine[1].tobytes() if channel.leads else b"")
    if seed is None:
        common = SecretStreams(secret=told[:SECRET_BYTES])
        words = np.frombuffer(told[SECRET_BYTES:], np.uint32)
        start = jax.random.wrap_key_data(jax.numpy.asarray(words))
    else:
        common, start = SecretStreams(seed), jax.random.key(seed)
    shard = Shard(sum(sizes[:number]), num_rows, total, adds_noise=channel.leads)
    return Job(
        inputs._replace(num_rows=total),
        Sharing(shard, channel),
        ShardStreams(common, SecretStreams(seed)),
        start,
        AllShards(tuple(found)),
    )


def check_alike(
    channel: Channel, prepared: PreparedFit, options: FitOptions, delta: float | None, job: Job
) -> None:
    """Refuse processes that were asked for different fits, in all of them.

    Raises:
        ValueError: Says in what they differ.
    """
    shape = jax.ShapeDtypeStruct
    one_row = [shape((1, *leaf.shape[1:]), leaf.dtype) for leaf in job.inputs.records]
    question = question_of(prepared, options, job.inputs._replace(records=one_row), delta=delta)
    versions = {name: metadata.version(name) for name in _PACKAGES}
    question |= {"versions": f"{versions}, {platform.machine()}"}
    asked = [json.loads(each) for each in channel.all(json.dumps(question).encode())]
    for number, other in enumerate(asked):
        if apart := [name for name in asked[0] if other.get(name) != asked[0][name]]:
            raise ValueError(
                f"processes: expected the same fit in all of them, got another {apart[0]} in "
                f"process {number} than in process 0. Start all with the same program."
            )


def _num_rows(args: Any, kwargs: dict[str, Any]) -> int:
    """Length of the data, as far as it is known before they are checked."""
    lengths: list[int] = []
    map_arrays(lambda leaf: lengths.append(len(leaf) if np.ndim(leaf) else 1), (args, kwargs))
    return lengths[0] if lengths and len(set(lengths)) == 1 else 1


def _one_row(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return np.zeros((1, *array.shape[1:]), array.dtype)


def _refuse_twins(sizes: list[int], found: list[bytes]) -> None:
    large = [(i, each) for i, each in enumerate(found) if sizes[i] >= _FEW_ROWS]
    first: dict[bytes, int] = {}
    for number, each in large:
        if each in first:
            raise ValueError(
                f"data: expected a part of the records in each process, got the same ones in "
                f"processes {first[each]} and {number}: every record would count twice, at the "
                "price of one. Give each process rows of its own."
            )
        first[each] = number
