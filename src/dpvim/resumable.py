"""A fit with a checkpoint: what identifies it, and how its progress is kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from dpvim import checkpoints
from dpvim._compile import single_precision
from dpvim.archives import FileError
from dpvim.bridge.data import ModelInput
from dpvim.checkpoints import Checkpoint
from dpvim.fingerprint import data_digest
from dpvim.inference.engine import State, eta_for
from dpvim.inference.progress import Progress
from dpvim.options import FitOptions
from dpvim.prepared import PreparedFit
from dpvim.privacy.randomness import SecretStreams
from dpvim.serialization import plan_to_json


class CheckpointKeeper:
    """Keeps the progress of a fit in a checkpoint; a `Keeper`.

    Attributes:
        id: Of the checkpoint, the same for all processes that continue the run. Public.
        streams: Batches and noise of the fit, from its first step on.
        start: Key of what is random in it and protects no privacy.
    """

    def __init__(self, checkpoint: Checkpoint, seed: int | None, num_steps: int) -> None:
        self._checkpoint, self._num_steps = checkpoint, num_steps
        self.id = checkpoint.id
        self.streams: SecretStreams = checkpoint.streams(seed)
        self.start = _key_of(checkpoint.start) if seed is None else jax.random.key(seed)

    def load(self, like: State) -> Progress | None:
        """Kept progress to go on from."""
        arrays = self._checkpoint.load()
        if arrays is None:
            return None
        try:
            return Progress.from_arrays(arrays, like)
        except (KeyError, ValueError, TypeError) as error:
            raise FileError(
                f"{self._checkpoint.folder}: damaged ({type(error).__name__}: {error})."
            ) from error

    def is_due(self) -> bool:
        """True if progress was not kept for a while."""
        return self._checkpoint.is_due()

    def keep(self, progress: Progress) -> None:
        """Keep progress, or the result of a run that is over."""
        is_over = int(progress.state.step) == self._num_steps
        keep = self._checkpoint.finish if is_over else self._checkpoint.save
        keep(progress.to_arrays())


@contextlib.contextmanager
def kept(
    prepared: PreparedFit,
    options: FitOptions,
    inputs: ModelInput,
    given: Any,
    *,
    delta: float | None,
) -> Iterator[CheckpointKeeper]:
    """The keeper of a fit, which has the checkpoint's folder to itself meanwhile.

    Args:
        given: The data, before any coins chose among them.
    """
    if options.checkpoint is None:
        raise ValueError("checkpoint: expected a folder, got None.")
    if (backend := jax.default_backend()) != "cpu":
        raise ValueError(
            f"checkpoint: expected a run on the CPU, got one on {backend!r}, where a step that is "
            "taken again may round differently: two releases with the same noise. Leave out the "
            "checkpoint, or set JAX_PLATFORMS=cpu."
        )
    question = question_of(prepared, options, inputs, delta=delta)
    with checkpoints.opened(options.checkpoint, question, data_digest(given)) as checkpoint:
        yield CheckpointKeeper(checkpoint, options.seed, prepared.plan.num_steps)


def question_of(
    prepared: PreparedFit, options: FitOptions, inputs: ModelInput, *, delta: float | None
) -> dict[str, str]:
    """All that a run depends on beside the data, its secret and its start."""
    plan = json.dumps({**plan_to_json(prepared.plan), "delta": delta}, sort_keys=True)
    chosen: Any = [options.seed, options.trace_every, options.init_params]
    return {
        "plan": plan,
        "options": data_digest(chosen).hex(),
        "model or optimiser": program_digest(prepared, inputs),
    }


@single_precision
def program_digest(prepared: PreparedFit, inputs: ModelInput) -> str:
    """SHA-256 of the very program that takes a step: model, family, variant, optimiser and clip.

    What a model looks like from outside would not do: a changed constant is another model. The
    program is made of shapes; it knows no data.
    """
    engine = prepared.engine
    shape = jax.ShapeDtypeStruct
    state = jax.eval_shape(
        engine.init, jax.random.key(0), shape((engine.family.dim,), np.float32), 1.0
    )
    records = jax.eval_shape(
        engine.prepare, [shape(leaf.shape, leaf.dtype) for leaf in inputs.records]
    )
    rows = shape((engine.plan.max_batch_size,), np.int32)
    noise = shape((engine.variant.num_released,), np.int32)

    def step(state: State, records: Any, rows: Any, noise: Any) -> Any:
        eta = eta_for(engine.family, state.key, state.step)
        return engine.step(state, eta, records, rows, noise)

    traced = jax.jit(step).trace(state, records, rows, noise)
    arranged = jax.jit(engine.prepare).trace(
        [shape(leaf.shape, leaf.dtype) for leaf in inputs.records]
    )
    found = hashlib.sha256()
    for program in (traced, arranged):
        found.update(program.lower().as_text().encode())
        found.update(data_digest([np.asarray(const) for const in program.jaxpr.consts]))
    steering = prepared.steering(prepared.options.init_params)
    if steering is not None:
        found.update(data_digest(*steering.progress().values(), *steering.place()))
    return found.hexdigest()


def _key_of(start: int) -> jax.Array:
    words = np.frombuffer(start.to_bytes(8, "little"), dtype=np.uint32)
    return jax.random.wrap_key_data(jax.numpy.asarray(words))
