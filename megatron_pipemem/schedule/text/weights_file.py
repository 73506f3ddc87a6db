"""Read what a user says of microbatches that are not alike: ``tokens``, ``FLOPs``, a file of weights, or a function's name."""

from __future__ import annotations

from typing import NamedTuple

from megatron_pipemem.errors import CostsError, UnsupportedError
from megatron_pipemem.reading import read_json
from megatron_pipemem.schedule.microbatches import MicrobatchWeights
from megatron_pipemem.schedule.options import FLOPS, TOKENS
from megatron_pipemem.schedule.text.costs_file import costs_arguments


class FileWeights(NamedTuple):
    """Hold the weights of a file.

    Args:
        path: of the file.
        steps: the weights of every training step, or one for all.
        one_for_all: whether these are the weights of every step.
    """

    path: str
    steps: tuple[MicrobatchWeights, ...]
    one_for_all: bool

    def of_step(self, iteration: int, num_microbatches: int) -> MicrobatchWeights:
        """Return the weights of a training step, counted from 0.

        Raises:
            CostsError: the file has none for this step, or not as many as it has microbatches.
        """
        if not self.one_for_all and iteration >= len(self.steps):
            raise CostsError(
                "wrong-count",
                f"{self.path} has weights of {len(self.steps)} training steps, and this is step {iteration + 1}; give those of "
                "every step, or one object for all",
            )
        weights = self.steps[0 if self.one_for_all else iteration]
        if len(weights) != num_microbatches:
            raise CostsError(
                "wrong-count",
                f"{self.path} weighs {len(weights)} microbatches, and training step {iteration + 1} has {num_microbatches}; "
                "give one weight per microbatch",
            )
        return weights


class FunctionName(NamedTuple):
    """Name a function that weighs a microbatch: its module, or the path of a Python file, and its name there."""

    module: str
    name: str


def read_microbatch_costs(asked: str) -> str | FileWeights | FunctionName:
    """Return ``tokens``, ``flops``, the weights of a JSON file, or the name of a function, whichever is asked for.

    Raises:
        UnsupportedError: it is none of these.
        CostsError: the file holds no weights.
    """
    if asked.lower() in (TOKENS, FLOPS):
        return asked.lower()
    if asked.endswith(".json"):
        return _file(asked)
    module, _, name = asked.rpartition(":")
    if not (module and name):
        raise UnsupportedError(
            "bad-choice",
            f"--pipemem-microbatch-costs {asked!r} is neither tokens, FLOPs, a .json file nor module:function; give one of "
            "these",
        )
    return FunctionName(module, name)


def _file(path: str) -> FileWeights:
    """What stands in the file is for all steps alike, or a list of it, one for each."""
    found = read_json(path, "weights of microbatches", CostsError)
    one_for_all = not isinstance(found, list) or not any(isinstance(each, list | dict) for each in found)
    steps = tuple(_weights(path, each) for each in ([found] if one_for_all else found))
    return FileWeights(path, steps, one_for_all)


def _weights(path: str, data: object) -> MicrobatchWeights:
    fields = data if isinstance(data, dict) else {"time": data}
    try:
        return MicrobatchWeights(**costs_arguments({"microbatch": fields})["microbatch"])
    except CostsError as error:
        raise CostsError(
            "wrong-file",
            f"{path} holds no weights of microbatches ({error}); write [1, 0.25], or "
            '{"time": [1, 0.25], "memory": [1, 0.5], "kinds": {"W": [1, 0.5]}}',
        ) from error
