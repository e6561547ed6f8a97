"""The meeting place of the processes of a `jax.distributed` job.

JAX knows how many they are, which one this is, and where process 0 is; the store of its
coordination service tells the others the port and the key of the job's own connections. (JAX's
collectives on processors take milliseconds a step; `benchmarks/processes.py`.)
"""

from __future__ import annotations

import itertools
import secrets
from typing import Any

import jax

from dpvim.channel import Channel, accept, connect, listening
from dpvim.types import LostProcessError

# Reading a table may take one process longer than another.
_PATIENCE_SECONDS = 300
_KEY_BYTES = 32
_meetings = itertools.count()


def several_processes() -> bool:
    """True if this process is one of several of an initialised `jax.distributed`."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def refuse_several_processes(name: str) -> None:
    """Refuse what knows no shards: it would take the part of the records for all of them."""
    if several_processes():
        raise ValueError(
            f"{name}: expected one process, got one of {jax.process_count()} of jax.distributed, "
            "of which each has a part of the records. dpvim.fit runs over several processes; call "
            "others where jax.distributed is not initialised, with all records."
        )


def meet() -> Channel:
    """Connections to all others, who call this as well.

    Raises:
        LostProcessError: If they do not come.
    """
    number, count = jax.process_index(), jax.process_count()
    place = f"dpvim/{next(_meetings)}"
    client, host = _coordination()
    if number == 0:
        key = secrets.token_bytes(_KEY_BYTES)
        with listening(host) as server:
            port: int = server.getsockname()[1]
            client.key_value_set_bytes(place, port.to_bytes(4, "little") + key)
            peers = accept(server, key, count - 1, _PATIENCE_SECONDS)
        client.key_value_delete(place)
        return Channel(0, peers)
    try:
        found = client.blocking_key_value_get_bytes(place, 1000 * _PATIENCE_SECONDS)
    except jax.errors.JaxRuntimeError as error:
        raise LostProcessError(
            f"process 0 did not come within {_PATIENCE_SECONDS} seconds. All processes have to "
            "call the same function."
        ) from error
    port, key = int.from_bytes(found[:4], "little"), bytes(found[4:])
    return Channel(number, [connect(host, port, key, number, _PATIENCE_SECONDS)])


def _coordination() -> tuple[Any, str]:
    """JAX's coordination service, and the host that it is on: that of process 0.

    JAX has no public way to the store, which its own checkpoints use as well.
    """
    from jax._src import distributed

    state = distributed.global_state
    assert state.coordinator_address is not None
    return state.client, state.coordinator_address.rpartition(":")[0].strip("[]")
